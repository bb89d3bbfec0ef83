"""The Chinese help of the scripts; the English one stands in them."""

# of argparse, in the order in which they stand in a help
PARSER_ZH = {
    "usage: ": "用法：",
    "positional arguments:": "参数：",
    "options:": "选项：",
    "show this help message and exit": "显示这份帮助",
}
FILES = "parquet、json、jsonl、csv、tsv 文件"
BY_NAME = "不写时按列名识别"
# of each script: its description under "", and the help of each of its arguments
SCRIPTS_ZH = {
    "chat": {
        "": """和训练好的模型对话：在终端里输入问题，或者从管道读问题，每行一个。

    python scripts/chat.py [MODEL_DIR] [--temperature 0.7] [--top_p 0.9] [--max_new_tokens 256]
    python scripts/chat.py model_save/sft_fast < questions.txt > answers.txt

MODEL_DIR 是 Hugging Face 目录、适配器目录或训练目录；不写时用最新的 model_save/*/best。没有写的选项以模型的
generation_config.json 为准。在终端里，模型能看到前面的对话；从管道读入的问题各答各的。
在终端里：/reset 开始新的对话，/undo 撤回上一个问题，/save 文件 保存对话，/settings 显示设置，
/settings temperature 0.7 修改设置，/settings thinking on（off、default）决定是否先思考；cls 清屏；exit、quit、Ctrl+D 和
Ctrl+C 退出。思考过程显示为暗色，从管道读入时不输出；模型调用的工具只显示，不执行。""",
        "model_dir": "模型目录",
        "single_turn": "每个问题单独回答，不带上文",
        "temperature": "温度；0：总选概率最高的词元；大于 0：按概率抽取",
        "top_k": "只从概率最高的这么多个词元里抽取；0：不限",
        "top_p": "只从概率合计达到此值的最可能的词元里抽取",
        "min_p": "只从概率不低于最高概率乘以此值的词元里抽取",
        "repetition_penalty": "大于 1：已出现的词元概率变小",
        "no_repeat_ngram_size": "禁止重复的片段长度（词元数，0：不限）",
        "seed": "第一个回答抽取用的随机种子，之后每个回答加一；种子相同，回答相同",
        "max_new_tokens": "回答最多的词元数",
        "thinking": "on 或 off：是否先思考，用于两种方式都学过的模型",
    },
    "prepare_data": {
        "": "清洗数据文件，把问答对写成一个 parquet 文件，并按原因统计丢弃的行。",
        "inputs": f"{FILES}，或文件夹",
        "output": "输出的 parquet 文件",
        "validation_output": "验证数据写到哪个文件",
        "validation_share": "验证数据占全部问答对的比例（0.01）",
        "prompt_column": f"问题所在的列；{BY_NAME}",
        "response_column": f"回答所在的列；{BY_NAME}",
        "encoding": "文本文件的编码；不写则自动判断",
        "max_chars": "问题和回答各自最多的字符数（%(default)s）",
        "max_context_chars": "说到这么多字符，就另起一个对话（%(default)s）",
        "single_turn": "不带系统提示和上文",
        "report": "说明输出文件的内容，并画出长度分布",
        "tokenizer_dir": "--report 用的分词器目录",
        "max_seq_len": "--report 用：训练时在多少个词元处截断（%(default)s）",
        "strict": "只要有一个文件读不到结尾，就什么都不写",
        "overwrite": "覆盖已有的输出文件",
    },
    "train_tokenizer": {
        "": """用问答对文件或纯文本文件（每行一段）训练分词器，并打印概况。

    python scripts/train_tokenizer.py data/train.parquet more.jsonl --output_dir model_save/tokenizer --vocab_size 8000
        [--kind byte_level] [--prompt_column NAME] [--response_column NAME] [--encoding NAME] [--overwrite]

--kind=character 用于 T5：汉字、其他文字和符号不会合成一个词元。
--kind=byte_level 用于解码器（--model=mini）：和 Qwen 同类，其他引擎都能读。
每一百行留出一行，用来测量每个词元平均有几个字符。""",
        "files": f"{FILES}、txt 文件，或文件夹",
        "output_dir": "分词器写到哪个目录",
        "vocab_size": "词表的词元数，有 100 个哨兵时至少 400",
        "sentinels": "objective=span 的空用的词元数",
        "kind": "character 用于 T5，byte_level 用于解码器",
        "prompt_column": f"问题所在的列；{BY_NAME}",
        "response_column": f"回答所在的列；{BY_NAME}",
        "encoding": "文本文件的编码；不写则自动判断",
        "overwrite": "覆盖已有的分词器",
    },
    "serve": {
        "": """用训练好的模型提供服务：OpenAI 的 HTTP 接口，以及一个对话网页。

    python scripts/serve.py MODEL_DIR [MODEL_DIR…] [--run RUN_DIR] [--host 127.0.0.1] [--port 8000] [--api_key KEY]

MODEL_DIR 是 Hugging Face 目录或训练目录。有几个模型时，请求里的 model 选其中一个，网页并排显示
它们的回答。网页还显示训练目录 RUN_DIR（或一个文件夹里的各次训练），训练时实时更新。
需要另外安装：pip install -e '.[serve]'""",
        "model_dirs": "模型目录，可以有几个",
        "run": "网页显示哪个训练目录，或装着几个训练目录的文件夹",
        "host": "监听的地址；不是本机地址时必须写 --api_key",
        "port": "端口",
        "api_key": "API 密钥；默认：$CHAT_API_KEY",
        "slots": "同时生成的回答数；0：GPU 上 64 个，CPU 上 16 个",
        "max_prompt_tokens": "提问最多的词元数",
        "max_new_tokens": "回答最多的词元数",
        "max_waiting": "最多允许多少个请求排队",
        "request_seconds": "一个回答最多用多少秒",
        "single_turn": "每个问题单独回答，不带上文",
    },
    "check_training_progress": {
        "": "从训练日志查看各次训练的进度。",
        "run_dirs": "训练目录；不写时用 model_save/ 下最近写过日志的那个",
        "watch": "显示训练的屏幕，直到按 Ctrl+C；写了秒数，或者不在终端上，就每隔这么多秒打印一次报告（默认 10 秒）",
        "plot": "画出损失随问答对和时间的变化",
    },
    "export": {
        "": "把训练好的模型再导出一份：bf16 权重、在 CPU 上很快的 CTranslate2，或 llama.cpp 和 Ollama 用的 gguf。",
        "model_dir": "Hugging Face 目录，或训练目录（用 best/，没有就用 last/）",
        "to": "导出成哪种格式",
        "output_dir": "写到哪个目录；默认：MODEL_DIR 后面加格式的名字",
        "quantization": "ctranslate2 的数值格式（%(default)s）",
        "type": "gguf 的权重格式（%(default)s）",
        "overwrite": "覆盖已有的目录",
    },
    "merge_lora": {
        "": """把适配器合并进底座，写成普通的模型目录。

    python scripts/merge_lora.py ADAPTER_DIR OUTPUT_DIR

ADAPTER_DIR 是适配器的目录，或其训练目录（用 best/，没有就用 last/）。底座的位置由适配器记录；分词器用适配器的，
没有就用底座的。逐个矩阵以 float32 相加，再按底座的精度写出，所以比内存大的模型也能合并。""",
        "adapter": "适配器目录或训练目录",
        "output": "写到哪个目录",
    },
    "average": {
        "": """把几个同样大小的模型取平均，写成普通的模型目录。

    python scripts/average.py MODEL MODEL [MODEL…] --output DIR

MODEL 是训练的检查点（RUN_DIR/checkpoints/step_…）、Hugging Face 目录或训练目录（用 best/，没有就用 last/）。分词器和
生成设置用第一个的。逐个张量以 float32 取平均。退出码：0 已写出，2 拒绝，1 磁盘错误。""",
        "models": "检查点、模型目录或训练目录，至少两个",
        "output": "写到哪个目录",
    },
    "push": {
        "": """把模型发送到 Hugging Face Hub；仓库是私有的，除非给出 --public。

    python scripts/push.py DIR USER/NAME [--public] [--base 组织/名字] [--dry_run] [--yes]

DIR 是模型目录、适配器目录、scripts/export.py 写出的目录，或训练目录（用 best/，没有就用 last/）。先列出要发送的
文件，再询问。检查点、词元库和日志从不发送。适配器的文件里写底座在 Hub 上的名字，不写目录；
写了 --base，模型卡里也写它。先登录：`hf auth login`。
退出码：0 已发送或已列出，2 拒绝，1 Hub 或网络错误。""",
        "directory": "模型目录",
        "repo": "Hub 上的仓库",
        "public": "所有人都能读",
        "base": "从哪个模型训练来的：它在 Hub 上的名字；在 Hugging Face 缓存里的不用写",
        "dry_run": "只列出会发送什么，不发送",
        "yes": "不询问，直接发送",
    },
    "make_preferences": {
        "": """用自己的模型生成偏好数据：文件里的回答是好回答，模型自己的回答是差回答。

    python scripts/make_preferences.py MODEL_DIR FILE --output preferences.jsonl [--rows 5000] [--samples 4]

MODEL_DIR 是 Hugging Face 目录、适配器目录或训练目录。FILE 是任何能训练问答对的文件；每个对话只比较最后一个回答。模型
按贪心解码回答；写了 --samples 就回答这么多次，取最差的：有循环的，其次没有自行结束的，再其次长度相差最多的。模型的回答
和原回答相同的行会略过。中断后再输入同样的命令就会继续。然后训练：

    python train_low_mem.py train --objective=dpo --train_file=preferences.jsonl --finetune_from_ckp_file=MODEL_DIR …

退出码：0 已写出，2 拒绝，1 其他。""",
        "model_dir": "模型目录",
        "file": FILES,
        "output": "输出的 .jsonl 文件",
        "rows": "只用文件的前多少个对话；0：全部",
        "samples": "每个问题回答几次，取最差的一个；1：贪心解码",
        "temperature": "大于 0：按概率抽取；默认 0，写了 --samples 时 0.8",
        "seed": "抽取用的随机种子",
        "max_new_tokens": "回答最多的词元数（%(default)s）",
        "max_prompt_tokens": "问题更长的行会略过（%(default)s）",
        "slots": "同时生成的回答数；0：GPU 上 256 个，CPU 上 64 个",
        "prompt_column": f"问题所在的列；{BY_NAME}",
        "response_column": f"回答所在的列；{BY_NAME}",
        "overwrite": "覆盖输出文件，从头开始",
    },
    "convert_tokenizer": {
        "": """把模型的 SentencePiece 分词器转换成训练能读的 tokenizer.json，只需一次，不联网。

    python scripts/convert_tokenizer.py MODEL_DIR

由 transformers 转换（pip install -e '.[convert]'）。文件写在权重旁边；tokenizer_config.json 里缺少的
eos、pad、unk 词元名称会补上，其余不变。""",
        "directory": "模型目录",
    },
    "train_lora": {
        "": """用教程里的命令训练 LoRA 适配器：transformers、PEFT、bitsandbytes 的参数。

    python scripts/train_lora.py --model_name_or_path Qwen/Qwen1.5-7B-Chat --data_path ./data/dataset \\
        --output_dir ./output --use_4bit --bf16 --num_train_epochs 3 --per_device_train_batch_size 1 \\
        --gradient_accumulation_steps 16 --learning_rate 2e-4 --lora_rank 32 --lora_alpha 64 --save_steps 500 \\
        --max_seq_length 1024 --logging_steps 10 --dataloader_num_workers 2
    accelerate launch --multi_gpu --num_processes 2 scripts/train_lora.py ...       用 torchrun 也可以

第一个参数写 plan 或 doctor，就只估算或检查，不训练。先打印每个参数在这里是什么，再用这些选项运行 train_low_mem.py；
它自己的选项在这里也能用，见 docs/options.md。停下之后再输入同一条命令就接着训练。模型名如果不是目录，就在
Hugging Face 和 ModelScope 已下载的模型里找；不会下载任何东西。""",
    },
    "lm_eval_model": {
        "": """用 lm-evaluation-harness 评测这里训练的模型（T5 也可以），它在其中的名字是 chat_trainer。

    python scripts/lm_eval_model.py --model_args pretrained=MODEL_DIR --tasks TASK[,TASK…] [lm_eval 的选项]

MODEL_DIR 是 Hugging Face 目录或训练目录。所有选项都是 lm_eval 自己的，见 lm_eval run --help。
先 pip install -e '.[eval]'。""",
    },
    "demo_data": {
        "": "写出演示用的 train.parquet、valid.parquet 和 test.parquet。",
        "output_dir": "写到哪个目录",
        "pairs": "三个文件合计大约多少对",
        "seed": "随机种子",
    },
    "demo_score": {
        "": "按回答是否完全一致给导出的模型打分。",
        "model_dir": "模型目录",
        "test_file": "测试文件",
        "minimum": "正确率低于此值（0 到 1）时退出码为 1",
    },
}

# why a guide's option has nothing to set here, by its words in option_names.NEEDLESS
NEEDLESS_ZH = {
    "it is chosen to fit the memory": "会按显存自动选择",
    "every step is split to fit the memory": "每一步都会切到放得下",
    "the last step of an epoch may be smaller, and no example is dropped": "一轮的最后一步可以小一些，不丢弃样本",
    "a thread always prepares the next step": "总有一个线程在准备下一步",
    "examples are always packed, without padding": "样本总是打包，没有填充",
    "the fastest kernels of the device are used": "总是使用这台设备上最快的算子",
    "best/ always has the best model of the run": "best/ 里总是这次训练最好的模型",
    "weights are read from the mapped file straight to the device": "权重从映射的文件直接读到设备上",
    "no code of a model is ever run": "从不运行模型自带的代码",
    "an evaluation computes as the training does, in bf16 where the GPU has it, and keeps no second copy of the "
    "weights": "评估和训练的计算方式相同，GPU 支持时用 bf16，不另存一份权重",
    "training keeps no cache of keys and values": "训练时不保存键和值的缓存",
    "it is not needed": "不需要",
    "four bits are kept in bytes, and computed without bitsandbytes": "4 位的权重存成字节，计算不用 bitsandbytes",
    "examples are packed without padding, and tokenised once for all runs": "样本打包、没有填充，分词只做一次",
}
