"""Tokenizer directories in the shapes of common model families, made without training: the same on every machine.

The merges are those that build a list of words from left to right. Templates are our own, in the families' manner: what
they do with tools, blanks, system messages, BOS and content parts is what makes chats hard to tokenize alike.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = """
the of and to in is that it for on with as this was at be by not are from or an have you which one were all her
she there would their we him been has when who will no more if out so said what up its about into them can only
other time new some could these two may first then do any like my now over such our man me even most made after
system user assistant tool function name parameters arguments description string object type properties city
weather get today answer question token prefix cache block hello world class return import self None True False
""".split()  # noqa: SIM905 (a hundred quoted words are no easier to read)

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_text = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' }}
{{- date_string if date_string is defined else 'some day' }}
{%- if tools %}
    {{- '\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- '\\n' }}
    {%- endfor %}
{%- endif %}
{{- system_text + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' + ('(' + message.name + ')' if message.name else '') + '\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last_question %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}
            {{- call | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_text = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_text is defined %}
            {{- '[INST] ' + system_text + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- else %}
        {{- raise_exception('no such role: ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set before = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set before = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set before = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}{{ item['cache_control'] | tojson if item['cache_control'] is defined }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""

STYLES = ("llama", "qwen", "mistral", "mistral-first", "gemma", "uncut")
"""Directories that `make` can make. `uncut` has tokens that reach into their neighbourhood, so it is never cut."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def make(style: str, directory: Path) -> Path:
    """A tokenizer directory of the style, in `directory`, which is made."""
    tokenizer, settings, template = {
        "llama": _llama,
        "qwen": _qwen,
        "mistral": lambda: _mistral(first=False),
        "mistral-first": lambda: _mistral(first=True),
        "gemma": _gemma,
        "uncut": _uncut,
    }[style]()
    return write(directory, tokenizer, settings, template)


def panicking() -> Tokenizer:
    """It reads one character, as is tried when it is loaded, and the library panics of any longer text."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend("")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer, settings: Mapping[str, Any], template: str | None) -> Path:
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1_000_000, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def _merges(alphabet: Sequence[str], blank: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocabulary = {symbol: number for number, symbol in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in (*_WORDS, *(blank + word for word in _WORDS), "ll", "er", "ing", "on", "12", "123", "  ", "\n\n"):
        made = word[0]
        for letter in word[1:]:
            if made in vocabulary and letter in vocabulary and made + letter not in vocabulary:
                merges.append((made, letter))
                vocabulary[made + letter] = len(vocabulary)
            made += letter
    return vocabulary, merges


def _byte_level(specials: Sequence[str], *, nfc: bool = False) -> Tokenizer:
    vocabulary, merges = _merges(sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def _sentence_piece(specials: Sequence[str], *, prepend: str) -> Tokenizer:
    """`prepend`: `always` by normalizer, `first` word only, `never`."""
    letters = [*map(chr, range(33, 127)), "▁", "é", "ü", "ß", "你", "\n"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary, merges = _merges(["<unk>", *bytes_, *letters], "▁")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        blanks = normalizers.Replace(" ", "▁")
        both = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        tokenizer.normalizer = both if prepend == "always" else blanks
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def _begins_with(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))])


def _llama() -> tuple[Tokenizer, dict[str, Any], str]:
    named = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level([*named, *(f"<|reserved_special_token_{i}|>" for i in range(250))])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _begins_with(tokenizer, "<|begin_of_text|>")]
    )
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, LLAMA


def _qwen() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], nfc=True)
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "add_bos_token": False}
    return tokenizer, settings, QWEN


def _mistral(*, first: bool) -> tuple[Tokenizer, dict[str, Any], str]:
    tools = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
    tokenizer = _sentence_piece(
        ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *tools], prepend="first" if first else "always"
    )
    tokenizer.post_processor = _begins_with(tokenizer, "<s>")
    return (
        tokenizer,
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"},
        MISTRAL,
    )


def _gemma() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer = _sentence_piece(
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"], prepend="never"
    )
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False), AddedToken("  ", normalized=False)])
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True, rstrip=True, normalized=False)])
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "add_bos_token": True}
    late = {"content": "<late>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return tokenizer, {**settings, "added_tokens_decoder": {"9000": {**late, "special": True}}}, GEMMA


def _uncut() -> tuple[Tokenizer, dict[str, Any], str]:
    tokenizer, settings, template = _qwen()
    tokenizer.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    return tokenizer, settings, template
