"""Write the demo's pairs: short Chinese questions of nine kinds, each with one right answer, for exact match.

The training file has no prompt of the validation and test files. Kinds in FACTS test recall: the training file has the
same fact in other phrasings. Kinds in RULES test generalization: the training file has no question about the same
numbers or characters. The same --pairs and --seed give the same files.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model.runtime.environment import explain_missing_packages  # noqa: E402

explain_missing_packages()

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from model.commands.option_names import ScriptParser  # noqa: E402
from model.display.catalogue import texts_here  # noqa: E402

HELD_OUT_SHARE = 0.06  # of a kind of FACTS, in each held-out file; a kind of RULES has the same number there
RULE_SHARES = 2  # a kind of RULES gets twice the questions: a rule is harder to learn than a list
LEAST_COUNT = 20  # questions of a kind of FACTS

WEEKDAYS = "一二三四五六日"
ANTONYMS = """
大小 多少 高低 长短 快慢 冷热 黑白 左右 上下 前后 里外 远近 轻重 厚薄 粗细 胖瘦 新旧 早晚 开关 进出 来去 买卖 借还 哭笑
爱恨 真假 好坏 对错 美丑 善恶 强弱 软硬 干湿 生死 男女 天地 阴阳 升降 胜负 输赢 问答 始终 古今 南北 东西 深浅 宽窄 浓淡
明暗 香臭 甜苦 贵贱 贫富 忙闲 动静 难易 松紧 虚实 正反 公私 存亡 攻守 加减 聚散 曲直 横竖 盈亏 悲喜 饥饱 优劣
"""
CAPITALS = """
中国:北京 日本:东京 韩国:首尔 法国:巴黎 德国:柏林 英国:伦敦 美国:华盛顿 俄罗斯:莫斯科 意大利:罗马 西班牙:马德里
葡萄牙:里斯本 希腊:雅典 埃及:开罗 印度:新德里 泰国:曼谷 越南:河内 老挝:万象 缅甸:内比都 蒙古:乌兰巴托 加拿大:渥太华
墨西哥:墨西哥城 古巴:哈瓦那 巴西:巴西利亚 秘鲁:利马 智利:圣地亚哥 澳大利亚:堪培拉 新西兰:惠灵顿 瑞典:斯德哥尔摩
挪威:奥斯陆 芬兰:赫尔辛基 丹麦:哥本哈根 波兰:华沙 捷克:布拉格 奥地利:维也纳 匈牙利:布达佩斯 瑞士:伯尔尼 比利时:布鲁塞尔
荷兰:阿姆斯特丹 爱尔兰:都柏林 土耳其:安卡拉 冰岛:雷克雅未克 伊朗:德黑兰 伊拉克:巴格达 肯尼亚:内罗毕 乌克兰:基辅
菲律宾:马尼拉 马来西亚:吉隆坡 尼泊尔:加德满都 孟加拉国:达卡
"""
IDIOMS = """
画蛇添足 守株待兔 亡羊补牢 井底之蛙 对牛弹琴 狐假虎威 掩耳盗铃 刻舟求剑 拔苗助长 杯弓蛇影 一心一意 三心二意 四面八方
五颜六色 七上八下 九牛一毛 十全十美 百发百中 千军万马 万紫千红 半途而废 马到成功 龙飞凤舞 虎头蛇尾 鸡飞狗跳 打草惊蛇
如鱼得水 水滴石穿 风和日丽 春暖花开 秋高气爽 冰天雪地 鸟语花香 山清水秀 人山人海 车水马龙 自言自语 手忙脚乱 目不转睛
东张西望 大同小异 异口同声 名副其实 全力以赴 胸有成竹 愚公移山 卧薪尝胆 破釜沉舟 纸上谈兵 望梅止渴 闻鸡起舞 悬梁刺股
入木三分 完璧归赵 叶公好龙 滥竽充数
"""
UNITS = (  # (larger unit, how many smaller ones are one larger, smaller unit)
    ("米", 100, "厘米"), ("厘米", 10, "毫米"), ("分米", 10, "厘米"), ("千米", 1000, "米"),
    ("千克", 1000, "克"), ("元", 10, "角"), ("元", 100, "分"), ("世纪", 100, "年"), ("升", 1000, "毫升"),
)  # fmt: skip
CHARACTERS = "日月山水火木土石云雨风雪花草树鸟鱼牛羊马狗猫车门"

ASK_SUM = "{a}加{b}等于几？ {a}+{b}=？ 计算{a}加{b} {a}与{b}的和是多少？ 请问{a}加{b}得多少？".split()
ASK_DIFFERENCE = "{a}减{b}等于几？ {a}-{b}=？ 计算{a}减{b} {a}与{b}的差是多少？ 请问{a}减{b}得多少？".split()
ASK_LARGER = "{a}和{b}哪个大？ {a}与{b}谁更大？ 比较{a}和{b}，选大的 请问{a}和{b}中较大的数？".split()
ASK_SMALLER = "{a}和{b}哪个小？ {a}与{b}谁更小？ 比较{a}和{b}，选小的 请问{a}和{b}中较小的数？".split()
ASK_REVERSED = "把“{text}”倒过来写 “{text}”反过来怎么写？ 请倒着念“{text}” 从后往前读“{text}”".split()
ASK_POSITION = """
“{text}”中{place}个是什么？ “{text}”里{place}个字是？ 写出“{text}”的{place}个字 “{text}”{place}个是哪个？
""".split()
ASK_UNITS = (
    "{n}{large}是多少{small}？ {n}{large}等于几{small}？ 把{n}{large}换算成{small} {n}{large}合多少{small}？".split()
)
ASK_AFTER = """
今天星期{day}，{n}天后是星期几？ 星期{day}再过{n}天是星期几？ 星期{day}往后{n}天星期几？
从星期{day}起过{n}天是星期几？ 如果今天星期{day}，{n}天后呢？
星期{day}之后{n}天是星期几？ 今天是星期{day}，再过{n}天呢？
""".split()
ASK_BEFORE = """
今天星期{day}，{n}天前是星期几？ 星期{day}倒退{n}天是星期几？ 星期{day}往前{n}天星期几？
从星期{day}起倒数{n}天是星期几？ 如果今天星期{day}，{n}天前呢？
星期{day}之前{n}天是星期几？ 今天是星期{day}，{n}天以前呢？
""".split()
ASK_MONTH = """
现在{month}月，{n}个月后是几月？ {month}月再过{n}个月是几月？ 从{month}月起过{n}个月是几月？
{month}月往后{n}个月是几月？ 如果现在{month}月，{n}个月后呢？
""".split()
ASK_ANTONYM = """
“{word}”的反义词是什么？ 和“{word}”相反的字是？ “{word}”的反面是什么？ 请说出“{word}”的反义词 什么字与“{word}”意思相反？
与“{word}”相对的字是哪个？
""".split()
ASK_CAPITAL = """
{country}的首都是哪里？ {country}首都叫什么？ 请问{country}的首都在哪？ 哪个城市是{country}的首都？ 说出{country}的首都
你知道{country}的首都吗？ {country}定都在哪个城市？ {country}的首都是什么城市？
""".split()
ASK_COUNTRY = """
{city}是哪国的首都？ 哪个国家的首都是{city}？ 首都是{city}的是哪个国家？ 请问{city}是谁的首都？ 哪国首都叫{city}？
说出以{city}为首都的国家 {city}是什么国家的首都？ 哪个国家定都{city}？
""".split()
ASK_LAST = (
    "成语“{head}”后面是什么字？ 补全成语：{head}□ “{head}”的下一个字是？ {head}后面接哪个字？ 成语{head}什么？".split()
)
ASK_FIRST = (
    "成语“{tail}”前面是什么字？ 补全成语：□{tail} “{tail}”的上一个字是？ {tail}前面是哪个字？ 成语什么{tail}？".split()
)


@dataclass(frozen=True)
class Question:
    """One pair, its kind and its subject; all phrasings of a question have the same subject."""

    prompt: str
    response: str
    kind: str
    subject: str


def draw_arithmetic(rng: Random) -> Question:
    a, b = rng.randint(10, 89), rng.randint(1, 9)
    if rng.random() < 0.5:
        prompt = rng.choice(ASK_SUM).format(a=a, b=b)
        return Question(prompt, str(a + b), "arithmetic", f"{a}+{b}")
    return Question(rng.choice(ASK_DIFFERENCE).format(a=a, b=b), str(a - b), "arithmetic", f"{a}-{b}")


def draw_comparison(rng: Random) -> Question:
    a, b = rng.sample(range(1, 51), 2)
    ask, answer = rng.choice(((ASK_LARGER, max(a, b)), (ASK_SMALLER, min(a, b))))
    return Question(rng.choice(ask).format(a=a, b=b), str(answer), "comparison", f"{min(a, b)},{max(a, b)}")


def draw_reversal(rng: Random) -> Question:
    items = rng.sample(CHARACTERS, rng.randint(2, 4))
    text = "、".join(items)
    return Question(rng.choice(ASK_REVERSED).format(text=text), "、".join(reversed(items)), "reversal", text)


def draw_position(rng: Random) -> Question:
    items = rng.sample(CHARACTERS, rng.randint(3, 4))
    place, answer = rng.choice((("第一", items[0]), ("第二", items[1]), ("第三", items[2]), ("最后一", items[-1])))
    text = "、".join(items)
    return Question(rng.choice(ASK_POSITION).format(text=text, place=place), answer, "position", f"{text} {place}")


def draw_units(rng: Random) -> Question:
    n, (large, factor, small) = rng.randint(1, 99), rng.choice(UNITS)
    prompt = rng.choice(ASK_UNITS).format(n=n, large=large, small=small)
    return Question(prompt, f"{n * factor}{small}", "units", f"{n}{large}={small}")


def calendar_facts() -> Iterator[Question]:
    for start, day in enumerate(WEEKDAYS):
        for n in range(1, 4):
            for asks, shift in ((ASK_AFTER, n), (ASK_BEFORE, -n)):
                answer = f"星期{WEEKDAYS[(start + shift) % 7]}"
                yield from (Question(ask.format(day=day, n=n), answer, "calendar", f"{day}{shift:+}") for ask in asks)
    for month in range(1, 13):
        for n in range(1, 7):
            answer = f"{(month + n - 1) % 12 + 1}月"
            for ask in ASK_MONTH:
                yield Question(ask.format(month=month, n=n), answer, "calendar", f"{month}月+{n}")


def antonym_facts() -> Iterator[Question]:
    for pair in ANTONYMS.split():
        for word, opposite in (pair, pair[::-1]):
            yield from (Question(ask.format(word=word), opposite, "antonym", word) for ask in ASK_ANTONYM)


def capital_facts() -> Iterator[Question]:
    for country, city in (line.split(":") for line in CAPITALS.split()):
        for ask in ASK_CAPITAL:
            yield Question(ask.format(country=country), city, "capital", f"{country}→{city}")
        for ask in ASK_COUNTRY:
            yield Question(ask.format(city=city), country, "capital", f"{city}→{country}")


def idiom_facts() -> Iterator[Question]:
    for idiom in IDIOMS.split():
        for ask in ASK_LAST:
            yield Question(ask.format(head=idiom[:3]), idiom[3], "idiom", f"{idiom[:3]}□")
        for ask in ASK_FIRST:
            yield Question(ask.format(tail=idiom[1:]), idiom[0], "idiom", f"□{idiom[1:]}")


RULES: dict[str, Callable[[Random], Question]] = {
    "arithmetic": draw_arithmetic,
    "comparison": draw_comparison,
    "reversal": draw_reversal,
    "position": draw_position,
    "units": draw_units,
}
FACTS: dict[str, Callable[[], Iterator[Question]]] = {
    "calendar": calendar_facts,
    "antonym": antonym_facts,
    "capital": capital_facts,
    "idiom": idiom_facts,
}


def by_subject(questions: list[Question]) -> list[list[Question]]:
    """The questions grouped by subject, in order of first appearance."""
    groups = defaultdict(list)
    for question in questions:
        groups[question.subject].append(question)
    return list(groups.values())


def split_rule(draw: Callable[[Random], Question], count: int, held_out: int, rng: Random) -> list[list[Question]]:
    """[train, valid, test] of about `count` distinct questions; no subject is in two of them."""
    drawn: dict[str, Question] = {}
    for _ in range(20 * count):  # bounded: a kind may have fewer than `count` questions
        if len(drawn) == count:
            break
        question = draw(rng)
        drawn.setdefault(question.prompt, question)
    train, valid, test = [], [], []
    for group in by_subject(list(drawn.values())):
        split = next((part for part in (valid, test) if len(part) < held_out), train)
        split.extend(group)
    return [train, valid, test]


def split_facts(questions: list[Question], count: int, held_out: int, rng: Random) -> list[list[Question]]:
    """[train, valid, test] of about `count` questions; a held-out fact has all its other phrasings in train."""
    groups = by_subject(questions)
    rng.shuffle(groups)
    train, valid, test = [], [], []
    for group in groups:
        if len(train) + len(valid) + len(test) >= count:
            break
        rng.shuffle(group)
        split = next((part for part in (valid, test) if len(part) < held_out), train)
        split.append(group[0])
        train.extend(group[1:])
    return [train, valid, test]


def make_splits(pairs: int, seed: int) -> dict[str, list[Question]]:
    """{"train", "valid", "test": questions}, about `pairs` in total, each with questions of every kind.

    Raises ValueError if `pairs` is too small for that.
    """
    shares = RULE_SHARES * len(RULES) + len(FACTS)
    count = pairs // shares
    if count < LEAST_COUNT:
        raise ValueError(
            f"--pairs {pairs} is too few to hold out questions of every kind: use at least {shares * LEAST_COUNT}"
        )
    held_out = round(count * HELD_OUT_SHARE)
    splits: dict[str, list[Question]] = {"train": [], "valid": [], "test": []}
    for kind in [*RULES, *FACTS]:
        rng = Random(f"{seed} {kind}")
        if kind in RULES:
            parts = split_rule(RULES[kind], RULE_SHARES * count, held_out, rng)
        else:
            parts = split_facts(list(FACTS[kind]()), count, held_out, rng)
        for questions, part in zip(splits.values(), parts, strict=True):
            questions.extend(part)
    for questions in splits.values():
        Random(seed).shuffle(questions)
    return splits


def write_split(questions: list[Question], path: Path) -> None:
    """Write the parquet columns prompt, response and kind."""
    columns = ("prompt", "response", "kind")
    pq.write_table(pa.table({name: [getattr(q, name) for q in questions] for name in columns}), path)


def main() -> int:
    parser = ScriptParser(description="Write the demo's train.parquet, valid.parquet and test.parquet.")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=12000, help="approximate number of pairs in all three files")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        splits = make_splits(options.pairs, options.seed)
        options.output_dir.mkdir(parents=True, exist_ok=True)
        for name, questions in splits.items():
            write_split(questions, options.output_dir / f"{name}.parquet")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    counts = {name: len(questions) for name, questions in splits.items()}
    print(texts_here()("demo.written", directory=options.output_dir, **counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
