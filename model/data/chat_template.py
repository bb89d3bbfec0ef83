"""The format of a conversation as a Jinja template, which transformers applies with an exported tokenizer."""

import json
from pathlib import Path

from model.data.t5_text import MARKS, marks_of
from model.data.tokenizer import ChatTokenizer
from model.runtime.json_stream import read_object

TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE = """\
{%- set talk = namespace(system="", before="", text="", text_of=none) -%}
{%- for message in messages -%}
  {%- set part = namespace(text="", role="user" if message.role == "tool" else message.role) -%}
  {%- if message.content is string -%}
    {%- set part.text = message.content -%}
  {%- elif message.content is iterable -%}
    {%- set part.text = message.content | selectattr("text", "defined") | map(attribute="text") | join("\\n") -%}
  {%- endif -%}
  {%- if part.role == "assistant" -%}
    {%- set thought = part.text.split("</think>")[0].split("<think>") -%}
    {%- if "</think>" in part.text and (thought | length == 1 or not thought[0].strip()) -%}
      {%- set part.text = (part.text.split("</think>")[1:] | join("</think>")).lstrip("\\n") -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set said = call.function.arguments -%}
      {%- set said = said if said is string else said | tojson -%}
      {%- set said = '{"name": ' + (call.function.name | tojson) + ', "arguments": ' + said + "}" -%}
      {%- set part.text = part.text + ("\\n" if part.text else "") + "<tool_call>\\n" + said + "\\n</tool_call>" -%}
    {%- endfor -%}
  {%- elif message.role == "tool" -%}
    {%- set part.text = "<tool_response>\\n" + part.text + "\\n</tool_response>" -%}
  {%- endif -%}
  {%- for token, harmless in SPECIAL -%}
    {%- set part.text = part.text | replace(token, harmless) -%}
  {%- endfor -%}
  {%- if not part.text.strip() -%}
  {%- elif part.role in ("system", "developer") -%}
    {%- set talk.system = talk.system + ("\\n" if talk.system else "") + part.text -%}
  {%- elif part.role == talk.text_of -%}
    {%- set talk.text = talk.text + "\\n" + part.text -%}
  {%- elif part.role in ("user", "assistant") -%}
    {%- if talk.text_of -%}
      {%- set talk.before = talk.before + OPENERS[talk.text_of] + talk.text + CLOSER -%}
    {%- endif -%}
    {%- set talk.text = (PREFIX if part.role == "user" else "") + part.text -%}
    {%- set talk.text_of = part.role -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {%- set listed = namespace(text="<tools>") -%}
  {%- for tool in tools -%}{%- set listed.text = listed.text + "\\n" + (tool | tojson) -%}{%- endfor -%}
  {%- set talk.system = talk.system + ("\\n\\n" if talk.system else "") + listed.text + "\\n</tools>" -%}
{%- endif -%}
{%- if enable_thinking is defined and enable_thinking -%}
  {%- set talk.text = talk.text + "\\n/think" -%}
{%- endif -%}
{%- if talk.text_of != "user" -%}
  {{- raise_exception("the last message must be the user's, with text in it: it is what is answered") -}}
{%- endif -%}
{%- if talk.system -%}
  {%- set talk.before = OPENERS["system"] + talk.system + CLOSER + talk.before -%}
{%- endif -%}
{{- (talk.before + OPENERS["user"] if talk.before else "") + talk.text + EOS -}}
"""


def write_chat_template(tokenizer: ChatTokenizer, directory: str | Path, prefix: str = "") -> None:
    """Write the chat_template of a tokenizer to the directory that holds a copy of its files.

    transformers then parses special tokens in a text, which the template needs; see docs/conversations.md. A tokenizer
    that encodes the names of the roles alike gets no template.
    """
    try:
        template = chat_template(tokenizer, prefix)
    except ValueError:
        return
    settings_path = Path(directory, "tokenizer_config.json")
    settings = read_object(settings_path) if settings_path.exists() else {}
    settings["split_special_tokens"] = False
    settings.pop("chat_template", None)
    settings_path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    Path(directory, TEMPLATE_FILE).write_text(template, encoding="utf-8")


def chat_template(tokenizer: ChatTokenizer, prefix: str = "") -> str:
    """The Jinja template with which transformers' apply_chat_template gives the ids of `encode_conversation`, uncut.

    `prefix` stands before each of the user's turns.

    A control token that a message spells gets a space behind its first character, so that it stays text; messages of
    other roles are left out. Raises ValueError like `encode_conversation`.
    """
    marks = marks_of(tokenizer)
    openers = marks.prefixes if marks.closer else MARKS
    controls = [tokenizer.backend.id_to_token(number) for number in sorted(tokenizer.control_ids())]
    harmless = [[token, f"{token[0]} {token[1:]}"] for token in controls if len(token) > 1]
    for token, text in harmless:
        prefix = prefix.replace(token, text)
    values = dict(
        SPECIAL=harmless,
        PREFIX=prefix,
        OPENERS=openers,
        CLOSER=_spelled_closer(tokenizer, openers["user"]) if marks.closer else "",
        EOS=tokenizer.backend.id_to_token(tokenizer.eos_id),
    )
    head = "".join(
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for name, value in values.items()
    )
    return head + _TEMPLATE


def _spelled_closer(tokenizer, opener):
    """EOS as text, with a space behind it if the ids of the next turn need one."""
    eos = tokenizer.backend.id_to_token(tokenizer.eos_id)
    wanted = [tokenizer.eos_id, *tokenizer.encode(opener)]
    return next((text for text in (eos, eos + " ") if tokenizer.parse(text + opener) == wanted), eos)
