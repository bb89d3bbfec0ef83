"""Which encoding the text of a file is in: UTF-8, UTF-16 or, where it reads as Chinese, GB18030."""

import codecs
import re
from pathlib import Path

from model.data.compressed import open_bytes

SAMPLE_BYTES, SAMPLE_CHARS = 1 << 20, 1 << 16
MOST_SAMPLES = 64  # that are read until one is not ASCII, which all encodings have in common
MIN_SHARE = 0.3  # of FREQUENT among the letters beyond ASCII; other encodings read as GB18030 give rare characters
# Characters that Chinese texts consist of, for the most part.
FREQUENT = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去"
    "法学如都同现当没动面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关"
    "点正业外将两高间由问很最重并物手应战向头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通"
    "教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期"
    "市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难且权思王象完设式色路记南品住告类求据程北边"
    "死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笔亲功谢请您早晚答吗呢吧啊哪怎谁谓好嗯哦爱友喜欢服帮助病药医疗症治患"
    "食饮吃喝睡血痛手术查检治疗肤肝肾胃脑肺液素炎感染孕妇宝孩父母妈爸朋校班师课习试考读写词句语言英汉字典诗歌故新闻网站件软编程码算"
    "机器型训练模函输串数据库存取值列表删改增排序图片视频音乐电影游戏比赛球队运动员健康身体重轻低压温度热冷风雨雪云春夏秋冬花草树木"
    "商店买卖价钱元费用支付款账户号码密登录注册联系客户订单货物流发送收到退换快递店铺公司企工厂产品质量技术服务经理职位简历招聘岗面"
    "请求问题回答内容标题说明介绍描述步骤首先其次然后最后如果因为所以虽然但是而且或者以及根据通过进行需要可以应该能够必须注意建议包"
    "括例如方式办法情况影响作用原因结果目标计划选择决定认为觉得知道理解希望继续开始结束完成准备参考资料信息"
)
LIKELY_OTHERS = ("big5", "shift_jis", "euc_kr", "cp1252")  # are named where they fit


def find_encoding(path: Path) -> str:
    """The name of a file's encoding, for `open`; raises ValueError if it is none of UTF-8, UTF-16 and GB18030."""
    first, sample, is_whole, start = _sample(path)
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if first[:4].count(0) == 2:  # ASCII at the beginning, two bytes for each character
        return "utf-16-be" if first[0] == 0 else "utf-16-le"
    if isinstance(problem := _decoded(sample, "utf-8-sig", is_whole), str):
        return "utf-8-sig"
    as_gb = _decoded(sample, "gb18030", is_whole)
    if isinstance(as_gb, str) and _reads_as_chinese(as_gb):
        return "gb18030"
    why = (
        "it decodes as GB18030, but to characters that no Chinese text consists of"
        if isinstance(as_gb, str)
        else (f"byte {start + as_gb.start:,}: {as_gb.reason}")
    )
    are_single = not re.search(rb"[\x80-\xff]{2}", sample)  # as in European languages
    likely = sorted(LIKELY_OTHERS, key=lambda name: are_single and name != "cp1252")
    others = [name for name in likely if isinstance(_decoded(sample, name, is_whole), str)]
    guess = f"--encoding={others[0]} ({', '.join(others)}: it may be one of these)" if others else "--encoding=NAME"
    raise ValueError(
        f"{path}: neither UTF-8 nor GB18030 ({why}; not UTF-8 from byte {start + problem.start:,} on); save it as "
        f"UTF-8, or type {guess} to scripts/prepare_data.py, whose output is UTF-8"
    )


def _sample(path):
    """(the first bytes, the first that are not all ASCII, whether these end the file, the byte they begin at)."""
    with open_bytes(path) as file:
        first = sample = file.read(SAMPLE_BYTES)
        start, following = 0, file.read(SAMPLE_BYTES)
        while sample.isascii() and following and start < MOST_SAMPLES * SAMPLE_BYTES:
            start, sample, following = start + len(sample), following, file.read(SAMPLE_BYTES)
    return first, sample, not following, start


def check_encoding(name: str) -> str:
    """The name of an encoding that Python knows; ValueError for another."""
    try:
        codecs.lookup(name)
    except LookupError:
        raise ValueError(
            f"--encoding={name}: no such encoding; give utf-8, utf-16, gb18030, {', '.join(LIKELY_OTHERS)} or another"
        ) from None
    return name


def _decoded(sample, encoding, is_whole):
    """The text of a sample, or the UnicodeDecodeError."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(sample, is_whole)
    except UnicodeDecodeError as error:
        return error


def _reads_as_chinese(text):
    text = text[:SAMPLE_CHARS]
    letters = [char for char in text if ord(char) > 127 and (char.isalpha() or "\ue000" <= char <= "\uf8ff")]
    return sum(char in FREQUENT for char in letters) >= MIN_SHARE * len(letters)
