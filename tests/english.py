"""What is English in words that should be Chinese: sentences, not code, paths, names and options."""

import re

# commands, code, options with their values, paths and names of files; what is left is words
CODE = re.compile(
    r"^\s+(python|accelerate|torchrun|--|\[-).*$|`.*?`|\[.*?\]|'.*?'|-{1,2}\w\S*( [A-Z_.]+)?|\S*[/_=.]\w\S*", re.M
)
SENTENCE = re.compile(r"\b[A-Za-z][a-z]+,?( [a-z]{2,},?){2}")


def english_of(text):
    """The lines of `text` with three English words in a row."""
    return [line for line in CODE.sub(" ", text).splitlines() if SENTENCE.search(line)]
