"""A model's folder without weights: a configuration, a tokenizer trained here, a chat template with everything that engines
render.

It runs in the engines' own environments and needs nothing of this project.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MAX_TOKENS = 262_144
END = "<|im_end|>"
CORPUS = [
    "The cache holds blocks of tokens; a router asks which worker holds the most of them.",
    "Who holds this prefix? A worker that computed it before, in its memory or on its disk.",
    'def overlap(prompt): return max(worker.blocks for worker in pool)  # {"name": "weather", "arguments": {}}',
]
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for document in documents or [] %}<|im_start|>document
{{ document | tojson }}<|im_end|>
{% endfor %}
{%- if reasoning_effort %}<|im_start|>effort
{{ reasoning_effort }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if loop.last and message.role == "assistant" and enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}
{{- part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ (call.function or call) | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def write(folder: Path) -> Path:
    """Write the folder, with a one-layer Qwen3 that no test ever computes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True, normalized=False) for name in ("<|endoftext|>", "<|im_start|>", END)]
    plain = [
        AddedToken(name, special=False, normalized=False)
        for name in ("<think>", "</think>", "<tool_call>", "</tool_call>")
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(plain)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    _json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=MAX_TOKENS,
        eos_token=END,
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    _json(
        folder / "config.json",
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        vocab_size=512,
        eos_token_id=end,
        torch_dtype="bfloat16",
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        hidden_act="silu",
    )
    _json(folder / "generation_config.json", eos_token_id=end)
    return folder


def _json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values))
