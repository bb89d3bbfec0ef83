"""What people read, in each language: one catalogue, chosen by CHAT_LANG or the locale.

The screen's texts stand here, those of scripts in tool_words.py, of prepare_data in data_words.py, of doctor in
doctor_words.py, of plan in plan_words.py, of how models answer in answer_words.py, of log lines with numbers in
log_words.py, of the server's page in page_words.py, the others in words.py.
"""

import os
from collections.abc import Mapping

from model.display.answer_words import ANSWERS
from model.display.data_words import DATA
from model.display.doctor_words import DOCTOR
from model.display.log_words import LOG
from model.display.page_words import PAGE
from model.display.plan_words import PLAN
from model.display.tool_words import TOOLS
from model.display.words import WORDS

# in words: the least count, the number that is one unit, and its form
COUNTS = {
    "en": ((1e5, 1e6, "{:,.1f} M"), (0, 1e3, "{:,.1f} K")),
    "zh": ((1e8, 1e8, "{:,.4g} 亿"), (1e5, 1e4, "{:,.0f} 万"), (0, 1, "{:,.0f} ")),
}

SCREEN = {
    "en": {
        # what a run is doing
        "state.starting": "starting",
        "state.training": "training",
        "state.evaluating": "evaluating",
        "state.answering": "answering validation questions",
        "state.saving": "saving a checkpoint",
        "state.stopping": "stopping ... a checkpoint is written first",
        "state.finished": "finished at step {step:,}",
        "state.asked": "stopped on request at step {step:,}",
        "state.failed": "failed at step {step:,}",
        "state.silent": "silent for {time}: it may be dead, see the newest file in logs/",
        "state.waiting": "no line in the journal yet",
        # one line for each rank
        "rank": "rank",
        "memory": "GPU memory GiB",
        "peak": "peak",
        "card": "whole card",
        "utilisation": "busy",
        "temperature": "temp.",
        "power": "power",
        "process": "process GiB",
        "cpu": "CPU",
        "level.safe": "safe",
        "level.edge": "edge",
        "level.dangerous": "dangerous",
        "day": "d",
        "hour": "h",
        "minute": "m",
        "second": "s",
        # rows
        "row.step": "step",
        "row.loss": "training loss",
        "row.validation": "validation loss",
        "row.answers": "answers",
        "row.scores": "scores",
        "row.nats": "nats/character",
        "row.preferences": "preferences",
        "row.log_probs": "log-prob. a token",
        "row.gap": "over-fit gap",
        "row.rate": "learning rate",
        "row.speed": "speed",
        "row.wait": "data wait",
        "row.left": "time left",
        "row.save": "last save",
        "row.next": "next evaluation",
        "row.memory": "host memory",
        "row.events": "incidents",
        # their values
        "progress": "step {step:,}",
        "progress.of": "step {step:,}/{total:,} {share:.1%}",
        "epochs": "{done} of {total} epochs",
        "smoothed": "{loss} (smoothed {smoothed})",
        "validation": "{last}, best {best} (step {step:,})",
        "of.average": " (average)",
        "of.weights": " (weights)",
        "gap": "{gap:+.4f} (validation less training)",
        "gap.rising": "{gap:+.4f}, best {count} evaluations ago",
        "speed": "{tokens:,.0f} tokens/s, {pairs:,.4g} pairs/s",
        "speed.tokens": "{tokens:,.0f} tokens/s",
        "wait": "{milliseconds:,.1f} ms a step ({percent:.1f}%)",
        "left": "{run}, of this epoch {epoch}",
        "left.run": "{run}",
        "saved": "step {step:,}, {ago} ago",
        "saved.failed": "; that of step {step:,} failed",
        "next": "in {steps:,} steps, {time}",
        "next.steps": "in {steps:,} steps",
        "host_memory": "{used}/{total} GiB {percent:.0f}%, this run {run} GiB",
        "host_memory.run": "this run {run} GiB",
        "incidents": "{oom} out of memory, {skip} left out, {resume} resumes",
        "none": "none yet",
        "not_finite": "not finite",
        # figures of an evaluation
        "measure.loss": "loss",
        "measure.nats_per_char": "nats a character",
        "measure.loops": "loops",
        "measure.loops_chars": "loops of characters",
        "measure.ended": "ended",
        "measure.length_ratio": "length/ref",
        "measure.distinct_2": "distinct-2",
        "measure.exact_match": "exact",
        "measure.bleu": "BLEU",
        "measure.chrf": "chrF",
        "measure.rouge_l": "ROUGE-L",
        "measure.accuracy": "accuracy",
        "measure.margin": "margin",
        "measure.chosen_reward": "chosen",
        "measure.rejected_reward": "rejected",
        "measure.chosen_log_prob": "chosen",
        "measure.rejected_log_prob": "rejected",
        # events
        "events": "events",
        "log": "log",
        "curve": "training loss, smoothed, log scale, steps {first:,} to {last:,}",
        "samples": "answers at step {step:,}",
        "place.step": "step",
        "place.optimizer": "optimizer",
        "place.evaluate": "evaluate",
        "place.generate": "generate",
        "place.save": "save",
        "place.anywhere": "anywhere",
        "at_step": "step {step:,}: {said}",
        "event.oom": "out of memory in {where} on rank {rank}: done again",
        "event.oom.last": "out of memory in {where}: nothing smaller fits",
        "event.not_finite": "numbers that are not finite",
        "event.skip": "step left out: {why}",
        "event.resume": "resumed",
        "event.save": "the checkpoint failed: {error}",
        "event.stop": "the run ended: {reason}",
        "reason.finished": "finished",
        "reason.asked": "stopped on request",
        "reason.failed": "failed",
        # around the screen
        "quit": "Ctrl+C leaves this screen, not the run",
        "stop": "Ctrl+C stops the run with a checkpoint",
        "earlier": "(earlier lines are in the log file)",
    },
    "zh": {
        "state.starting": "正在启动",
        "state.training": "训练中",
        "state.evaluating": "正在评估",
        "state.answering": "正在回答验证集的问题",
        "state.saving": "正在保存检查点",
        "state.stopping": "正在停止……先保存检查点",
        "state.finished": "已完成，第 {step:,} 步",
        "state.asked": "已按要求停止，第 {step:,} 步",
        "state.failed": "已失败，第 {step:,} 步",
        "state.silent": "{time}没有动静：进程可能已退出，请看 logs/ 里最新的文件",
        "state.waiting": "日志里还没有记录",
        "rank": "进程",
        "memory": "显存 GiB",
        "peak": "峰值",
        "card": "整卡",
        "utilisation": "利用率",
        "temperature": "温度",
        "power": "功率",
        "process": "进程内存 GiB",
        "cpu": "CPU",
        "level.safe": "安全",
        "level.edge": "临界",
        "level.dangerous": "危险",
        "day": " 天",
        "hour": " 小时",
        "minute": " 分",
        "second": " 秒",
        "row.step": "步数",
        "row.loss": "训练损失",
        "row.validation": "验证损失",
        "row.answers": "回答",
        "row.scores": "分数",
        "row.nats": "每字损失",
        "row.preferences": "偏好",
        "row.log_probs": "每词元对数概率",
        "row.gap": "过拟合差距",
        "row.rate": "学习率",
        "row.speed": "速度",
        "row.wait": "等待数据",
        "row.left": "剩余时间",
        "row.save": "最近保存",
        "row.next": "下次评估",
        "row.memory": "主机内存",
        "row.events": "记录",
        "progress": "第 {step:,} 步",
        "progress.of": "第 {step:,} 步，共 {total:,} 步（{share:.1%}）",
        "epochs": "共 {total} 轮，已训练 {done} 轮",
        "smoothed": "{loss}（平滑 {smoothed}）",
        "validation": "{last}，最好 {best}（第 {step:,} 步）",
        "of.average": "（平均）",
        "of.weights": "（权重）",
        "gap": "{gap:+.4f}（验证减训练）",
        "gap.rising": "{gap:+.4f}，最好的在 {count} 次评估之前",
        "speed": "{tokens:,.0f} 词元/秒，{pairs:,.4g} 对/秒",
        "speed.tokens": "{tokens:,.0f} 词元/秒",
        "wait": "每步 {milliseconds:,.1f} 毫秒（{percent:.1f}%）",
        "left": "{run}，本轮 {epoch}",
        "left.run": "{run}",
        "saved": "第 {step:,} 步，{ago}前",
        "saved.failed": "；第 {step:,} 步的保存失败",
        "next": "再过 {steps:,} 步，{time}后",
        "next.steps": "再过 {steps:,} 步",
        "host_memory": "{used}/{total} GiB {percent:.0f}%，本次训练 {run} GiB",
        "host_memory.run": "本次训练 {run} GiB",
        "incidents": "显存不足 {oom} 次，跳过 {skip} 步，续训 {resume} 次",
        "none": "还没有",
        "not_finite": "NaN 或无穷大",
        "measure.loss": "损失",
        "measure.nats_per_char": "每字损失",
        "measure.loops": "循环",
        "measure.loops_chars": "循环（按字）",
        "measure.ended": "自行结束",
        "measure.length_ratio": "长度比",
        "measure.distinct_2": "distinct-2",
        "measure.exact_match": "完全一致",
        "measure.bleu": "BLEU",
        "measure.chrf": "chrF",
        "measure.rouge_l": "ROUGE-L",
        "measure.accuracy": "准确率",
        "measure.margin": "奖励差",
        "measure.chosen_reward": "好回答",
        "measure.rejected_reward": "差回答",
        "measure.chosen_log_prob": "好回答",
        "measure.rejected_log_prob": "差回答",
        "events": "事件",
        "log": "日志",
        "curve": "训练损失（平滑，对数刻度），第 {first:,} 到 {last:,} 步",
        "samples": "第 {step:,} 步时的回答",
        "place.step": "训练步",
        "place.optimizer": "更新权重",
        "place.evaluate": "评估",
        "place.generate": "生成回答",
        "place.save": "保存",
        "place.anywhere": "最小的方案",
        "at_step": "第 {step:,} 步：{said}",
        "event.oom": "显存不足（{where}，进程 {rank}）：已重做",
        "event.oom.last": "显存不足（{where}）：没有更小的方案可用",
        "event.not_finite": "出现 NaN 或无穷大",
        "event.skip": "跳过这一步：{why}",
        "event.resume": "从检查点继续",
        "event.save": "检查点保存失败：{error}",
        "event.stop": "训练结束：{reason}",
        "reason.finished": "已完成",
        "reason.asked": "按要求停止",
        "reason.failed": "失败",
        "quit": "按 Ctrl+C 离开本屏幕，不影响训练",
        "stop": "按 Ctrl+C 停止训练并保存检查点",
        "earlier": "（更早的行在日志文件里）",
    },
}
ROOMS = WORDS, LOG, ANSWERS, TOOLS, DATA, DOCTOR, PLAN, PAGE
CATALOGUE = {name: SCREEN[name] | {key: text for room in ROOMS for key, text in room[name].items()} for name in SCREEN}


class Texts:
    """The texts of one language."""

    def __init__(self, language: str = "en"):
        self.language, self._texts = language, CATALOGUE[language]

    def __call__(self, key: str, **values) -> str:
        """The text of `key` with `values` put in."""
        return self._texts[key].format(**values)

    def get(self, key: str, default: str) -> str:
        """The text of `key` as it stands; `default` where the catalogue has none."""
        return self._texts.get(key, default)


def language_of(environment: Mapping[str, str]) -> str:
    """The language that CHAT_LANG names, else that of the locale; English for any that the catalogue lacks."""
    names = ("CHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environment[name] for name in names if environment.get(name)), "")
    return next((language for language in CATALOGUE if chosen.lower().startswith(language)), "en")


def texts_here() -> Texts:
    """The texts of this process's language."""
    return Texts(language_of(os.environ))
