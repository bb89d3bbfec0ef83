"""The chat template of a tokenizer that has none: ChatML's, with thoughts and tools as Qwen's templates write them."""

import json

from model.data.t5_text import marks_of
from model.data.tokenizer import ChatTokenizer

CHATML = "<|im_start|>", "<|im_end|>"
BEFORE_TOOLS = (  # as in Qwen's templates
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>"
)
BEHIND_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
# Thoughts are shown behind the last question alone, as in Qwen3's template, and opened only where they are asked for.
_TEMPLATE = """\
{%- set last = namespace(question=-1) -%}
{%- for message in messages -%}
  {%- if message.role == "user" -%}{%- set last.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set rules = namespace(text="") -%}
{%- if tools -%}
  {%- for tool in tools -%}{%- set rules.text = rules.text + "\\n" + (tool | tojson) -%}{%- endfor -%}
  {%- set rules.text = BEFORE_TOOLS + rules.text + BEHIND_TOOLS -%}
  {%- if messages[0].role != "system" -%}{{- OPENERS["system"] + rules.text + CLOSER -}}{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {{- OPENERS["user"] if loop.first or messages[loop.index0 - 1].role != "tool" else "\\n" -}}
    {{- "<tool_response>\\n" + message.content + "\\n</tool_response>" -}}
    {%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- CLOSER -}}{%- endif -%}
  {%- else -%}
    {{- OPENERS[message.role] -}}
    {%- if message.reasoning_content and loop.index0 > last.question -%}
      {{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" -}}
    {%- endif -%}
    {{- message.content or "" -}}
    {%- for call in message.tool_calls or [] -%}
      {{- "\\n" if message.content or not loop.first else "" -}}
      {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' -}}
      {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) -}}
      {{- "}\\n</tool_call>" -}}
    {%- endfor -%}
    {%- if loop.first and message.role == "system" and tools -%}{{- "\\n\\n" + rules.text -}}{%- endif -%}
    {{- CLOSER -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- OPENERS["assistant"] -}}
  {%- if enable_thinking is defined and enable_thinking -%}{{- "<think>\\n" -}}{%- endif -%}
{%- endif -%}
"""


def default_template(tokenizer: ChatTokenizer) -> str:
    """ChatML's template, or one of the tokenizer's role marks and EOS if it lacks ChatML's tokens."""
    if all(tokenizer.backend.token_to_id(token) is not None for token in CHATML):
        openers = {role: f"{CHATML[0]}{role}\n" for role in ("system", "user", "assistant")}
        closer = CHATML[1] + "\n"
    else:
        marks, closer = marks_of(tokenizer), tokenizer.backend.id_to_token(tokenizer.eos_id)
        shown = {role: "".join(map(tokenizer.backend.id_to_token, ids)) for role, ids in marks.openers.items()}
        openers = {role: shown[role] + marks.prefixes[role] for role in shown}
    values = dict(OPENERS=openers, CLOSER=closer, BEFORE_TOOLS=BEFORE_TOOLS, BEHIND_TOOLS=BEHIND_TOOLS)
    return "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items()) + _TEMPLATE
