"""Chat templates with the branches of those that people use, written for the tests."""

# ruff: noqa: E501

from tests.data.qwen_tokenizer import CHATML

_TOOLS = (
    "# Tools\n\nYou may call one or more functions.\n<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    '\n</tools>\n\nReturn <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CALLS = (
    "{% for call in message.tool_calls %}{% if call.function %}{% set call = call.function %}{% endif %}"
    "{% if content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{{ \'{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' }}\n</tool_call>{% endfor %}"
)
_RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n"
    "{{ content }}\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
QWEN2_5 = (
    "{% if tools %}<|im_start|>system\n{{ messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}\n\n"
    + _TOOLS
    + "<|im_end|>\n{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'user' or message.role == 'system' and not loop.first"
    " or message.role == 'assistant' and not message.tool_calls %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if content %}{{ '\n' + content }}{% endif %}"
    "{% set content = true %}"
    + _CALLS
    + "<|im_end|>\n{% elif message.role == 'tool' %}"
    + _RESULT
    + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    + _TOOLS
    + "<|im_end|>\n{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}{% set ns = namespace(last=messages | length - 1, looking=true) %}{% for message in messages[::-1] %}"
    "{% if ns.looking and message.role == 'user' and not (message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}{% set ns.looking = false %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role == 'user' or message.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{% set thought = '' %}{% if message.reasoning_content is string %}"
    "{% set thought = message.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    + _CALLS
    + "<|im_end|>\n{% elif message.role == 'tool' %}" + _RESULT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)  # fmt: skip
# with a system text of its own, thoughts of all answers, and a thought that is opened where it is asked for
MINIMIND = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    + _TOOLS
    + "<|im_end|>\n{% else %}{{ '<|im_start|>system\n' + (messages[0].content if messages[0].role == 'system' else "
    "'You are a helpful assistant') + '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{% set content = message.content if message.content is string else '' %}"
    "{% if message.role == 'user' or message.role == 'system' and not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% elif message.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ content }}"
    + _CALLS
    + "<|im_end|>\n{% elif message.role == 'tool' %}" + _RESULT + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking %}"
    "{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)  # fmt: skip
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + "
    "message.content | trim + '<|eot_id|>' %}{{ bos_token + content if loop.first else content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# as TRL patches templates to learn from answers alone
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = dict(qwen1_5=CHATML, qwen2_5=QWEN2_5, qwen3=QWEN3, minimind=MINIMIND, llama3=LLAMA3, marked=MARKED)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
