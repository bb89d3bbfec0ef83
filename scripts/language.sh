# Sourced by the other scripts: the language that people read here, as in model/display/catalogue.py.

in_chinese() {
    local language=${CHAT_LANG:-${LC_ALL:-${LC_MESSAGES:-${LANG:-}}}}
    [[ ${language,,} == zh* ]]
}

# Prints $1, or $2 to people who read Chinese.
tell() {
    ! in_chinese || set -- "$2"
    printf '%s\n' "$1"
}
