"""Instructions: forms of records, what is refused with its line, and which tokens are learned."""

import json
import lzma
import re
from dataclasses import replace

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import finetune_helpers as kit
from nlr_lab.tasks.finetune.instructions import encode, summary, tokenize
from nlr_lab.tasks.finetune.records import Example, read_examples
from refusals import assert_refused
from seeds import rng

SAID = (("user", "the cat"), ("assistant", "sat on"), ("user", "a mat"), ("assistant", "very red"))
CHAT = [{"role": role, "content": content} for role, content in SAID]


def write(path, records, indent=None):
    text = json.dumps(records, indent=indent) if indent is not None else "\n".join(map(json.dumps, records))
    path.write_text(text, encoding="utf-8")
    return str(path)


def examples(path, template="plain", **options):
    return list(read_examples(str(path), template, **options))


@pytest.fixture
def tokenizer():
    return kit.tokenizer(False)


def test_alpaca_is_mapped_to_prompt_and_answer(tmp_path):
    records = [
        {"instruction": "Say yes.", "input": "", "output": "yes"},
        {"instruction": "Sort.", "input": "b a", "output": "a b"},
        {"instruction": "Say no.", "output": "no", "category": 3},
    ]
    path = write(tmp_path / "a.json", records, indent=2)
    plain = examples(path)
    assert plain == [Example("Say yes.\n\n", "yes"), Example("Sort.\nb a\n\n", "a b"), Example("Say no.\n\n", "no")]
    first, second, _ = examples(path, "alpaca")
    assert first.prompt.endswith("### Instruction:\nSay yes.\n\n### Response:\n")
    assert first.prompt.startswith("Below is an instruction that describes a task. Write a response")
    assert "### Input:\nb a\n\n### Response:\n" in second.prompt
    assert "paired with an input" in second.prompt
    chat = [{"role": "user", "content": "Sort.\nb a"}, {"role": "assistant", "content": "a b"}]
    assert examples(path, "chat", rows=2)[1:] == [Example(chat)]


def test_openorca_is_mapped_to_prompt_and_answer(tmp_path):
    asked = {"id": "flan.1", "question": "2 + 2?", "response": "4"}
    records = [asked | {"system_prompt": "Be short."}, asked | {"system_prompt": ""}, asked]
    path = write(tmp_path / "a.jsonl", records)
    assert examples(path) == [Example("Be short.\n2 + 2?\n\n", "4"), *[Example("2 + 2?\n\n", "4")] * 2]
    first, second, _ = examples(path, "alpaca")
    assert first.prompt.endswith("### Instruction:\nBe short.\n\n### Input:\n2 + 2?\n\n### Response:\n")
    assert second.prompt.endswith("### Instruction:\n2 + 2?\n\n### Response:\n")
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    system = {"role": "system", "content": "Be short."}
    assert examples(path, "chat") == [Example([system, *turns]), *[Example(turns)] * 2]
    empty = [asked | {"question": " ", "system_prompt": "Be short."}, asked | {"response": ""}]
    assert examples(write(tmp_path / "b.jsonl", empty)) == ["empty prompt", "empty answer"]


def test_every_kind_of_file_gives_the_same(tmp_path):
    records = [{"prompt": f"p{index}\u2028", "completion": f"c{index}"} for index in range(3)]
    lines = write(tmp_path / "a.jsonl", records)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress((tmp_path / "a.jsonl").read_bytes()))
    expected = [Example(each["prompt"], each["completion"]) for each in records]
    for path in (lines, write(tmp_path / "a.json", records, indent=1), tmp_path / "a.jsonl.xz"):
        assert examples(path) == expected
    chat = [{"role": "user", "content": "p0\u2028"}, {"role": "assistant", "content": "c0"}]
    assert examples(lines, "chat", rows=1) == [Example(chat)]
    shared = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat on"}]
    records = [{"messages": CHAT[:2]}, {"conversations": shared}, {"prompt": CHAT[:1], "completion": CHAT[1:2]}]
    assert examples(write(tmp_path / "b.jsonl", records)) == [*[Example(CHAT[:2])] * 2, Example(CHAT[:2], given=1)]
    empty = [{"instruction": "x", "output": "  "}, {"instruction": " ", "input": "", "output": "x"}]
    empty += [{"prompt": "x", "completion": ""}, {"messages": []}]
    empty += [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}]
    found = examples(write(tmp_path / "c.jsonl", empty))
    assert found == ["empty answer", "empty prompt", "empty answer", "empty answer", "empty answer"]


def test_tables_and_folders_are_read_as_json_is(tmp_path):
    records = [{"messages": CHAT[:2]}, {"messages": CHAT}]
    rows = [{"prompt": f"p{index}", "completion": f"c{index}"} for index in range(3)]
    Dataset.from_list(records).to_parquet(str(tmp_path / "chats.parquet"))
    Dataset.from_list(rows).to_csv(str(tmp_path / "rows.csv"))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    Dataset.from_list(rows).to_parquet(str(tmp_path / "folder" / "test.parquet"))
    assert examples(tmp_path / "chats.parquet") == [Example(CHAT[:2]), Example(CHAT)]
    for path in (tmp_path / "rows.csv", tmp_path / "saved", f"{tmp_path / 'folder'}@test"):
        assert examples(path) == [Example(each["prompt"], each["completion"]) for each in rows]
    assert_refused(r"no instruction file '.*none\.parquet'", examples, tmp_path / "none.parquet")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    assert_refused(r"cannot load the dataset '.*torn\.parquet' \(", examples, tmp_path / "torn.parquet")


def test_system_prompts_and_history_are_kept(tmp_path):
    system, turns = {"role": "system", "content": "Be short."}, CHAT[:2]
    alpaca = {"instruction": "Sort.", "output": "a b", "system": "Be short."}
    records = [
        {"messages": turns, "system": "Be short."},
        {"messages": [{"role": "system", "content": "own"}, *turns], "system": "Be short."},
        {"prompt": turns[:1], "completion": turns[1:], "system_prompt": "Be short."},
        {"prompt": "the ", "completion": "cat", "system_prompt": "Be short."},
        alpaca,
        alpaca | {"input": "b a"},
        alpaca | {"history": [["1?", "2"]]},
    ]
    path = write(tmp_path / "a.jsonl", records)
    whole = [system, {"role": "user", "content": "Sort."}, {"role": "assistant", "content": "a b"}]
    old = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]
    found = examples(path, "chat")
    assert found[0] == Example([system, *turns])
    assert found[1].prompt[0]["content"] == "own"
    assert found[2] == Example([system, *turns], given=2)
    assert found[3].prompt[0] == found[4].prompt[0] == system
    assert found[4] == Example(whole)
    assert found[5].prompt[1]["content"] == "Sort.\nb a"
    assert found[6] == Example([system, *old, *whole[1:]], given=4)
    path = write(tmp_path / "b.jsonl", records[:6])
    plain = [each.prompt for each in examples(path)[3:]]
    assert plain == ["Be short.\n\nthe ", "Be short.\nSort.\n\n", "Be short.\n\nSort.\nb a\n\n"]
    pairs = "line 7: a record's history is pairs of a question and an answer, and needs the template chat"
    assert_refused(pairs, examples, tmp_path / "a.jsonl")


@pytest.mark.parametrize("first", ["user", "system", "tool"])
def test_chats_that_the_assistant_opens_are_kept(tmp_path, first):
    greeting = {"role": "assistant", "content": "hello"}
    blank = [greeting, {"role": first, "content": " "}, CHAT[1]]
    records = [
        {"messages": [greeting, CHAT[0] | {"role": first}, CHAT[1]]},
        {"messages": blank},
        {"messages": [greeting]},
    ]
    kept, *dropped = examples(write(tmp_path / "a.jsonl", records))
    assert kept == Example(records[0]["messages"])
    assert dropped == ["empty prompt", "empty prompt"]


@pytest.mark.parametrize("array", [False, True], ids=["lines", "array"])
@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"instruction": "x"}, "record needs the texts instruction and output"),
        ({"prompt": "x"}, "record needs"),
        ({"question": "x", "response": "y", "system_prompt": ["z"]}, "record needs"),
        ({"text": "x", "id": 3}, "it is {'text': 'x', 'id': 3}"),
        ({"instruction": "x", "output": 3}, "it is {'instruction': 'x', 'output': 3}"),
        ({"instruction": "x", "output": "y", "input": ["z"]}, "record needs"),
        ({"prompt": "x", "completion": [{"role": "user", "content": "x"}]}, "record needs"),
        ({"messages": "x"}, "record needs"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "a message needs the texts role and content"),
        ({"messages": CHAT, "tools": "weather"}, "record's tools are not JSON"),
        ({"messages": CHAT, "tools": {"name": "weather"}}, "tools are a list, or one as JSON, not {'name'"),
        ({"messages": CHAT, "chat_template_kwargs": ["x"]}, "chat_template_kwargs are an object, not ['x']"),
        (
            {"messages": [{"role": "user"}]},
            "a message needs the texts role and content, or tool_calls; it is {'role'",
        ),
        (["x"], "record needs"),
    ],
)
def test_wrong_records_are_named_with_their_place(tmp_path, record, words, array):
    good = {"instruction": "a\nb", "output": "c"}
    path = write(tmp_path / "a.json", [good, good, record, good], indent=2 if array else None)
    place = f"{path}, {'record' if array else 'line'} 3: a "
    assert_refused(f"^{re.escape(place)}.*{re.escape(words.removeprefix('a '))}", examples, path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"instruction": "x", "output": "y"}\n{"instruction": \n', "line 2 is not JSON"),
        (b'[{"instruction": "x", "output": "y"},\n\n{"instruction" "x"}]', "is not JSON: .*line 3"),
        (b"\xff", "line 1 is not UTF-8 text"),
        (None, r"no instruction file '.*a\.json'"),
    ],
)
def test_files_that_are_no_json(tmp_path, text, words):
    if text is not None:
        (tmp_path / "a.json").write_bytes(text)
    assert_refused(words, examples, tmp_path / "a.json")
    assert_refused("cannot load the dataset 'no/such'", examples, "no/such")


def test_docstrings_of_the_standard_library_are_embedded():
    found = examples("stdlib", "alpaca", rows=30)
    assert len(found) == 30
    for example in found:
        code = example.prompt.partition("### Input:\n")[2]
        assert code.startswith(("def ", "@"))
        assert example.answer[:20] not in code


def encoded(tokenizer, *example):
    ((tokens, mask),) = encode(tokenizer, [Example(*example)])
    return tokenizer.decode(tokens), tokenizer.decode(tokens[mask])


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "mat"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
USED = [
    {"role": "user", "content": "the mat?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "look"},
    {"role": "tool", "content": "red", "name": "weather", "tool_calls": None},
    {"role": "assistant", "content": "it is red"},
]


def test_chats_keep_their_tools_and_thoughts(tmp_path):
    thoughtful = {"enable_thinking": False}
    records = [
        {"messages": USED, "tools": [TOOL]},
        {"messages": USED[:2], "tools": json.dumps([TOOL]), "chat_template_kwargs": thoughtful},
        {"prompt": USED[:1], "completion": USED[1:2], "tools": None, "chat_template_kwargs": None},
    ]
    whole, first, pair = examples(write(tmp_path / "a.jsonl", records))
    called = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "look"}
    heard = {"role": "tool", "content": "red", "name": "weather"}
    assert whole == Example([USED[0], called, heard, USED[3]], options={"tools": [TOOL]})
    assert first == Example([USED[0], called], options={"tools": [TOOL], **thoughtful})
    assert pair == Example([USED[0], called], given=1)


def test_templates_that_pass_tools_over_are_refused(tokenizer):
    listing = "tokenizer's chat template shows no tools; choose a model whose template does"
    assert_refused(listing, encoded, tokenizer, CHAT, "", 0, {"tools": [TOOL]})
    assert_refused("shows no tool_calls", encoded, tokenizer, [{"content": ""} | each for each in USED])
    plain = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    # Of two templates, the one for tools is used where a record has some.
    tools = plain + "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"
    tokenizer.chat_template = {"default": plain, "tool_use": tools}
    assert "[UNK]" in encoded(tokenizer, CHAT[:2], "", 0, {"tools": [TOOL]})[0]
    assert "[UNK]" not in encoded(tokenizer, CHAT[:2])[0]
    tokenizer.chat_template = "{{ raise_exception('no system turn') }}"
    assert_refused(r"chat template fails on \[\{'role': 'user'.*: no system turn", encoded, tokenizer, CHAT[:2])
    tokenizer.chat_template = plain
    twice = "fails on .* multiple values for keyword argument 'chat_template'"
    assert_refused(twice, encoded, tokenizer, CHAT[:2], "", 0, {"chat_template": "x"})


def test_only_answers_and_their_ends_are_learned(tokenizer):
    assert encoded(tokenizer, "the cat ", "sat on ") == ("the cat sat on [SEP]", "sat on [SEP]")
    # An end that is there is not put twice.
    assert encoded(tokenizer, "the cat ", "sat on [SEP]") == ("the cat sat on [SEP]", "sat on [SEP]")
    assert encoded(tokenizer, CHAT)[1] == "sat on [SEP] very red [SEP]"
    assert tokenizer.chat_template is not None, "it is saved with the tokenizer"
    assert encoded(tokenizer, CHAT, "", 3)[1] == "very red [SEP]", "an answer in the question is asked, not learned"


def test_a_template_without_marks_learns_the_last_answer(tokenizer):
    words = "{{ m['content'] }} {{ eos_token }}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }} " + words + " {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    with pytest.warns(UserWarning, match="only a chat's last"):
        assert encoded(tokenizer, CHAT)[1] == "very red [SEP]"
    assert encoded(tokenizer, CHAT[:2])[1] == "sat on [SEP]"
    marked = "{% if m['role'] == 'assistant' %}{% generation %}" + words + "{% endgeneration %}{% else %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(words, marked + words + "{% endif %}")
    assert encoded(tokenizer, CHAT)[1] == "sat on [SEP] very red [SEP]"


def test_tokenizers_in_python_learn_the_last_answer():
    tokenizer = ByT5Tokenizer()
    with pytest.warns(UserWarning, match="one in Python: only a chat's last is learned"):
        text, learned = encoded(tokenizer, CHAT)
    assert text.endswith("### Assistant:\nsat on</s>### User:\na mat\n### Assistant:\nvery red</s>")
    assert learned == "very red</s>"


def test_rows_are_counted_cut_and_dropped(tmp_path, tokenizer):
    records = [
        {"prompt": "the cat ", "completion": "sat"},
        {"prompt": "the cat ", "completion": "sat on a mat and saw"},  # cut within the answer
        {"prompt": "the " * 20, "completion": "sat"},  # nothing of the answer is left
        {"prompt": "the ", "completion": " "},
        {"prompt": "", "completion": "red"},
    ]
    found, facts = tokenize(tokenizer, write(tmp_path / "a.jsonl", records), "plain", 6)
    dropped = {"no answer within max_length": 1, "empty answer": 1, "empty prompt": 1}
    assert facts == {"rows": 5, "cut": 2, "dropped": dropped}
    assert [len(ids) for ids in found.ids] == [4, 6]
    assert found.labels[1][:2].tolist() == [-100, -100]
    assert (found.labels[1][2:] == found.ids[1][2:]).all()
    assert summary(facts) == (
        "5 rows, 3 dropped (1 empty answer, 1 empty prompt, 1 no answer within max_length), 2 longer than max_length"
    )


def test_counts_are_printed_and_sides_are_apart(tmp_path, capsys):
    task = kit.instruction_task(tmp_path)
    prepared = task.prepare()
    assert capsys.readouterr().out == "instructions: 30 rows, 0 dropped, 0 longer than max_length\n"
    assert (len(prepared.train), len(prepared.valid)) == (24, 6)
    assert prepared.describe()["dropped"] == {}
    other = kit.instruction_file(tmp_path / "valid.json", rows=8, seed=5)
    apart = kit.instruction_task(tmp_path, valid_source=other, eval_rows=5).prepare(progress=False)
    assert (len(apart.train), len(apart.valid)) == (30, 5)
    assert capsys.readouterr().out == ""


def test_rows_that_are_left_unread_are_said(tmp_path, capsys):
    path = kit.instruction_file(tmp_path / "many.json", rows=31)
    for rows, words in ((30, "the first 30 rows, 0 dropped"), (31, "31 rows, 0 dropped"), (None, "31 rows, 0 dropped")):
        kit.instruction_task(tmp_path, source=path, rows=rows).prepare()
        out = capsys.readouterr().out
        assert out.startswith(f"instructions: {words}")
        assert ("; --task.instructions.rows None reads all" in out) == (rows == 30)


@pytest.mark.parametrize("own", [False, True], ids=["share", "valid_source"])
def test_copies_of_held_out_examples_are_not_trained_on(tmp_path, capsys, own):
    records = [{"prompt": f"the cat {'sat ' * number}", "completion": "on a mat"} for number in range(1, 11)]
    twice = write(tmp_path / "twice.json", [*records, *records, *records])
    settings = {"valid_source": write(tmp_path / "valid.json", records[:2])} if own else {"held_out": 0.1}
    prepared = kit.instruction_task(tmp_path, source=twice, max_length=64, **settings).prepare()
    train, valid = ({tuple(ids.tolist()) for ids in side.ids} for side in (prepared.train, prepared.valid))
    assert not train & valid
    assert len(train | valid) == 10
    dropped = 30 - (0 if own else 3) - len(prepared.train)
    assert prepared.describe()["dropped"] == {"also held out": dropped}
    assert f"30 rows, {dropped} dropped ({dropped} also held out)" in capsys.readouterr().out
    assert dropped == 6 or (dropped > 0 and not own)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_learned_tokens_are_those_of_trl(tmp_path):
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    generator = rng()
    rows = [
        {"prompt": kit.sentence(generator, words) + " ", "completion": kit.sentence(generator)}
        for words in [*generator.integers(1, 14, 38).tolist(), 1, 13]  # one that is kept and one that is dropped
    ]
    task = kit.instruction_task(tmp_path, source=write(tmp_path / "rows.jsonl", rows), max_length=12)
    ours, facts = tokenize(task.model.tokenizer(), task.instructions.source, "plain", 12)
    about = {"output_dir": str(tmp_path / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
    cuts = {"max_length": 12, "truncation_mode": "keep_start", "completion_only_loss": True, "shuffle_dataset": False}
    model = AutoModelForCausalLM.from_pretrained(task.model.checkpoint)
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": task.model.tokenizer()}
    trainer = SFTTrainer(model, SFTConfig(**about, **cuts), **data)
    theirs = trainer.train_dataset
    assert len(theirs) == len(ours) < 40
    assert facts["dropped"]["no answer within max_length"] == 40 - len(theirs)
    for mine, row in zip(range(len(ours)), theirs, strict=True):
        assert ours.ids[mine].tolist() == row["input_ids"]
        assert ours.labels[mine].tolist() == row["labels"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_learned_tokens_of_tool_chats_are_those_of_trl(tmp_path):
    from transformers import AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import qwen3_chat_template

    checkpoint = kit.language_model(tmp_path / "model")
    letters = Tokenizer(BPE(vocab={each: at for at, each in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.chat_template = qwen3_chat_template
    called = [{name: each for name, each in turn.items() if each is not None} for turn in USED]
    called[1]["content"] = ""
    rows = [
        {"messages": called, "tools": [TOOL]},
        {"messages": called[:2], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": CHAT},
        {"prompt": called[:1], "completion": called[1:2]},
    ]
    for row in rows:
        path = write(tmp_path / "rows.jsonl", [row])
        ours, _ = tokenize(tokenizer, path, "chat", 4096)
        about = {"output_dir": str(tmp_path / "trl"), "report_to": [], "use_cpu": True, "bf16": False}
        how = {"max_length": None, "assistant_only_loss": "messages" in row, "shuffle_dataset": False}
        data = {"train_dataset": Dataset.from_list([row]), "processing_class": tokenizer}
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        (theirs,) = SFTTrainer(model, SFTConfig(**about, **how), **data).train_dataset
        assert ours.ids[0].tolist() == theirs["input_ids"]
        assert ours.labels[0].tolist() == theirs["labels"]
        text = tokenizer.decode(ours.ids[0][ours.labels[0] != -100])
        assert ("<tool_call>" in text) == ("tool_calls" in str(row)), text
        assert ("<tools>" in tokenizer.decode(ours.ids[0])) == ("tools" in row)


def test_tokenizers_and_rows_that_do_not_serve(tmp_path):
    task = kit.instruction_task(tmp_path)
    prepared = task.prepare(progress=False)
    prepared.tokenizer.add_tokens(["brand", "new"])
    assert_refused("22 tokens and the model 20 embeddings", task.build_model, prepared)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 4}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    kit.tokenizer(False).save_pretrained(tmp_path / "gpt2")
    short = replace(task, model=replace(task.model, checkpoint=str(tmp_path / "gpt2"), targets=("c_attn",)))
    longer = r"the model has 4 positions and rows have up to \d+; lower --max-length"
    assert_refused(longer, short.build_model, short.prepare(progress=False))
    wide = GPT2LMHeadModel(GPT2Config(**{**sizes, "n_positions": 16}))
    wide.save_pretrained(tmp_path / "gpt2")
    packed = replace(short, instructions=replace(short.instructions, packing=True))
    rows = packed.prepare(progress=False)
    assert max(rows.train.lengths) > 16, "each of several examples, whose positions begin anew"
    packed.build_model(rows)
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "the", "completion": ""}] * 3)
    reason = r"0 rows are left to train and 0 to evaluate on \(.* 3 dropped .*raise --max-length"
    assert_refused(reason, kit.instruction_task(tmp_path, source=empty).prepare, progress=False)
    tokenizer = kit.tokenizer(False)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(task.model.checkpoint)
    assert_refused("no end-of-text token", task.prepare, progress=False)


@pytest.mark.shared_data
def test_the_alpaca_sample(shared_data):
    from nlr_lab.tasks.text.tokenizers import load_tokenizer

    gpt2 = load_tokenizer(str(shared_data / "gpt2_bpe"))
    found, facts = tokenize(gpt2, str(shared_data / "alpaca_sample" / "alpaca_2000.json"), "alpaca", 512, 300)
    assert (facts["rows"], facts["dropped"], len(found)) == (300, {}, 300)
    text = gpt2.decode(found.ids[0])
    answer = gpt2.decode(found.ids[0][found.labels[0] != -100])
    assert re.search(r"### Response:\n$", text.removesuffix(answer))
    assert answer.endswith("<|endoftext|>") or len(found.ids[0]) == 512
