"""The texts of the catalogue about a model's answers: how they are decoded, and models beside each other."""

ANSWERS = {
    "en": {
        "decoding": "answers: {how} ({why}{figures})",
        "decoding.greedy": "always the likeliest token",
        "decoding.drawn": "drawn",
        "decoding.sound": "the highest chrF of the ways that hardly loop and end",
        "decoding.short": "the most exact matches, as half of the references are short",
        "decoding.least": "no way ends and hardly loops, this one comes nearest",
        "decoding.figures": "; on {count} validation questions {chosen_loops:.1%} loop, {chosen_ended:.1%} end, chrF "
        "{chosen_chrf:.2f}; the likeliest tokens: {greedy_loops:.1%}, {greedy_ended:.1%}, {greedy_chrf:.2f}",
        "decoding.typed": "as typed",
        "decoding.base": "as the weights' publisher says",
        "decoding.few": "too few validation questions to choose another way",
        "decoding.brief": "too short a run to try other ways in 3 % of its time; --temperature=0.7 --top_p=0.95 draws",
        "decoding.cut": "time, memory or a stop ended the trial of other ways",
        "decoding.failed": "the trial of other ways failed",
        "usage.test": "  test MODEL ... --test_file=FILE: a table of several models; --show=N: prints N of the answers",
        "test.reference": "right answer",
        "test.unlike": "the models were not asked the same questions: each reads a file in its own way",
    },
    "zh": {
        "decoding": "回答方式：{how}（{why}{figures}）",
        "decoding.greedy": "总选概率最高的词元",
        "decoding.drawn": "按概率抽取",
        "decoding.sound": "在很少循环、能自己结束的方式中 chrF 最高",
        "decoding.short": "参考回答多半很短，取完全一致最多的方式",
        "decoding.least": "没有一种方式能很少循环并自己结束，这种最接近",
        "decoding.figures": "；{count} 个验证问题中循环 {chosen_loops:.1%}，自己结束 {chosen_ended:.1%}，"
        "chrF {chosen_chrf:.2f}；总选最高概率时为 {greedy_loops:.1%}、{greedy_ended:.1%}、{greedy_chrf:.2f}",
        "decoding.typed": "按指定",
        "decoding.base": "按权重发布者的设置",
        "decoding.few": "验证问题太少，没有另选",
        "decoding.brief": "训练太短，用它 3% 的时间来不及比较其他方式；--temperature=0.7 --top_p=0.95 可按概率抽取",
        "decoding.cut": "比较其他方式时超时、内存不足或收到停止请求",
        "decoding.failed": "比较其他方式时出错",
        "usage.test": "  test 模型 ... --test_file=文件：多个模型并列成表；--show=N：打印 N 个回答",
        "test.reference": "参考回答",
        "test.unlike": "各模型被问的问题不完全相同：同一个文件，它们的读法不同",
    },
}
