"""MMLU and the commonsense tests over local rows: against log-likelihoods summed by hand in float64."""

import gzip
import json
import lzma
import math
import socket
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from jinja2 import Environment

from nlr_lab.evaluation import find_local_tasks, score_tasks
from nlr_lab.evaluation.commonsense import TESTS
from nlr_lab.evaluation.mmlu import CATEGORIES, PUBLISHED, SUBJECTS
from nlr_lab.evaluation.table import task_table
from nonlinear_lowrank import UserError
from task_helpers import byte_tokenizer, commonsense_rows, likelihoods, mmlu_rows, tiny_model, write_lines

FILES = {
    "boolq_local": "boolq",
    "piqa_local": "piqa",
    "siqa_local": "social_i_qa",
    "hellaswag_local": "hellaswag",
    "winogrande_local": "winogrande",
    "arc_easy_local": "ARC-Easy",
    "arc_challenge_local": "ARC-Challenge",
    "openbookqa_local": "openbookqa",
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a local task opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def lm_eval_task(path):
    """A task file that lm-eval ships."""
    import lm_eval

    return yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / path).read_text(encoding="utf-8"))


# --- MMLU ----------------------------------------------------------------------------------------------------


def mmlu_prompt(subject, shots, row):
    """The published 5-shot prompt, written out."""

    def ask(row):
        lines = [row["question"].strip(), *(f"{a}. {b}" for a, b in zip("ABCD", row["choices"], strict=True))]
        return "\n".join([*lines, "Answer:"])

    head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    answered = [f"{ask(shot)} {'ABCD'[shot['answer']]}\n\n" for shot in shots]
    return head + "".join(answered) + ask(row)


def mmlu_choice(model, tokenizer, dev, row, shots=5):
    examples = [each for each in dev if each["subject"] == row["subject"]][:shots]
    prompt = mmlu_prompt(row["subject"], examples, row)
    return int(likelihoods(model, tokenizer, prompt, [f" {letter}" for letter in "ABCD"]).argmax())


@pytest.mark.parametrize("shots", [None, 2, 0])
def test_mmlu_picks_the_letter_that_is_likeliest_by_hand(model, tokenizer, tmp_path, shots):
    subjects = ["abstract_algebra", "anatomy", "world_religions"]
    dev, test = mmlu_rows(subjects, 6), mmlu_rows(subjects, 4)
    for row in test:  # every answer right in one subject, every answer wrong in another, random in the third
        picked = mmlu_choice(model, tokenizer, dev, row, 5 if shots is None else shots)
        if row["subject"] != "anatomy":
            row["answer"] = picked if row["subject"] == "abstract_algebra" else (picked + 1) % 4
    write_lines(tmp_path / "test.jsonl", test)
    write_lines(tmp_path / "dev.jsonl", dev)
    local = find_local_tasks(["mmlu_local"], tmp_path, shots=shots)
    scores = score_tasks(model, tokenizer, local=local, batch_size=3)
    assert scores["mmlu_local_abstract_algebra"]["acc,none"] == 1.0
    assert scores["mmlu_local_world_religions"]["acc,none"] == 0.0
    anatomy = [row for row in test if row["subject"] == "anatomy"]
    hits = [row["answer"] == mmlu_choice(model, tokenizer, dev, row, 5 if shots is None else shots) for row in anatomy]
    assert scores["mmlu_local_anatomy"]["acc,none"] == sum(hits) / 4
    assert scores["mmlu_local_anatomy"]["n"] == 4
    assert scores["mmlu_local_anatomy"]["published_n"] == 135
    assert scores["mmlu_local_anatomy"]["shots"] == (5 if shots is None else shots)
    assert "truncated" not in scores["mmlu_local_anatomy"]


def test_mmlu_asks_as_the_task_file_of_lm_eval_does():
    theirs = lm_eval_task("mmlu/default/_default_template_yaml")
    from nlr_lab.evaluation.mmlu import TASK

    names = ("doc_to_text", "doc_to_choice", "doc_to_target", "output_type", "fewshot_config", "metric_list")
    assert {name: TASK[name] for name in names} == {name: theirs[name] for name in names}
    for subject in SUBJECTS:
        file = lm_eval_task(f"mmlu/default/mmlu_{subject}.yaml")
        topic = subject.replace("_", " ")
        assert file["description"].startswith(
            f"The following are multiple choice questions (with answers) about {topic}."
        )


def test_categories_are_those_of_the_paper_and_averages_come_in_two_ways(model, tokenizer, tmp_path):
    subjects = ["astronomy", "philosophy", "sociology", "marketing", "anatomy"]
    # As many questions as the subject's place in the list, so that the two averages differ.
    test = [row for i, subject in enumerate(subjects, start=1) for row in mmlu_rows([subject], 2 * i)]
    dev = mmlu_rows(subjects, 5)
    write_lines(tmp_path / "mmlu" / "test.jsonl", test)
    write_lines(tmp_path / "mmlu" / "dev.jsonl", dev)
    local = find_local_tasks(["mmlu_local"], tmp_path)
    scores = score_tasks(model, tokenizer, local=local)
    hits = {subject: [] for subject in subjects}
    for row in test:
        hits[row["subject"]].append(float(mmlu_choice(model, tokenizer, dev, row) == row["answer"]))

    def check(name, values, key="acc"):
        assert scores[name][f"{key},none"] == pytest.approx(statistics.mean(values), abs=1e-12)
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert scores[name][f"{key}_stderr,none"] == pytest.approx(error, abs=1e-12)
        assert scores[name]["n"] == len(values)
        return statistics.mean(values), error

    parts = [
        check("mmlu_local_stem", hits["astronomy"]),
        check("mmlu_local_humanities", hits["philosophy"]),
        check("mmlu_local_social_sciences", hits["sociology"]),
        check("mmlu_local_other", hits["marketing"] + hits["anatomy"]),  # in the paper anatomy is no STEM
    ]
    check("mmlu_local", [each for subject in subjects for each in hits[subject]])
    whole = scores["mmlu_local"]
    assert whole["acc_of_categories,none"] == pytest.approx(statistics.mean(value for value, _ in parts))
    expected = math.sqrt(sum(error**2 for _, error in parts)) / 4
    assert whole["acc_of_categories_stderr,none"] == pytest.approx(expected)
    assert whole["published_n"] == PUBLISHED
    table = "\n".join(task_table(scores, local.hidden))
    assert "mmlu_local_marketing" not in table
    assert "and 5 subjects" in table
    assert "mmlu_local is 30 questions, the published test 14,042: not comparable" in table


def test_the_table_of_subjects_is_whole():
    assert {category: sum(subjects.values()) for category, subjects in CATEGORIES.items()} == {
        "stem": 3018,
        "humanities": 4705,
        "social_sciences": 3077,
        "other": 3242,
    }
    assert len(SUBJECTS) == 57
    assert sum(SUBJECTS.values()) == PUBLISHED


def test_prompts_that_do_not_fit_are_counted(tokenizer, tmp_path):
    write_lines(tmp_path / "test.jsonl", [*mmlu_rows(["virology"], 3)])
    write_lines(tmp_path / "dev.jsonl", mmlu_rows(["virology"], 5))
    model = tiny_model(tokenizer, positions=64)
    local = find_local_tasks(["mmlu_local_virology"], tmp_path)
    scores = score_tasks(model, tokenizer, local=local)
    assert scores["mmlu_local_virology"]["truncated"] == 3
    assert "3 prompts did not fit" in "\n".join(task_table(scores))


# --- commonsense ---------------------------------------------------------------------------------------------


def asked(name, row):
    """Contexts and continuations by lm-eval's own rules, written out."""
    question, choices = row["parts"]["question"], row["parts"]["choices"]
    if name == "winogrande_local":
        before, after = question.split("_")
        return [(before + choice, f" {after.strip()}") for choice in choices]
    context = {
        "siqa_local": f"Q: {question}\nA:",
        "hellaswag_local": question,
        "openbookqa_local": question,
    }.get(name, f"Question: {question}\nAnswer:")
    return [(context, f" {choice}") for choice in choices]


@pytest.mark.parametrize("name", FILES)
def test_choices_are_compared_as_by_hand(model, tokenizer, tmp_path, name):
    rows = commonsense_rows(FILES[name], 12)
    right, right_by_length = [], []
    for row in rows:
        sums = torch.cat([likelihoods(model, tokenizer, context, [rest]) for context, rest in asked(name, row)])
        gold = {"true": 1, "false": 0}.get(row["answer"])
        gold = int(row["answer"][-1]) - 1 if gold is None else gold
        right.append(int(sums.argmax()) == gold)
        lengths = torch.tensor([len(choice) for choice in row["parts"]["choices"]])
        right_by_length.append(int((sums / lengths).argmax()) == gold)
    write_lines(tmp_path / f"{FILES[name]}.jsonl", rows)
    scores = score_tasks(model, tokenizer, local=find_local_tasks([name], tmp_path), batch_size=5)[name]
    assert scores["acc,none"] == pytest.approx(sum(right) / 12)
    assert scores["n"] == 12
    # As lm-eval's own files have it.
    assert ("acc_norm,none" in scores) == (name not in ("boolq_local", "siqa_local", "winogrande_local"))
    if "acc_norm,none" in scores:
        assert scores["acc_norm,none"] == pytest.approx(sum(right_by_length) / 12)


@pytest.mark.parametrize(
    ("name", "path", "fields"),
    [
        ("boolq_local", "super_glue/boolq/default.yaml", lambda q, c: {"passage": "", "question": q.rstrip("?")}),
        ("piqa_local", "piqa/piqa.yaml", lambda q, c: {"goal": q}),
        ("siqa_local", "siqa/siqa.yaml", lambda q, c: {"context": q.split()[0], "question": " ".join(q.split()[1:])}),
        ("hellaswag_local", "hellaswag/hellaswag.yaml", lambda q, c: {"query": q}),
        ("arc_easy_local", "arc/arc_easy.yaml", lambda q, c: {"question": q}),
        ("openbookqa_local", "openbookqa/openbookqa.yaml", lambda q, c: {"question_stem": q}),
    ],
)
def test_questions_read_as_in_the_task_files_of_lm_eval(tmp_path, name, path, fields):
    yaml.SafeLoader.add_constructor("!function", lambda loader, node: None)  # HellaSwag's process_docs
    theirs = lm_eval_task(path)
    (row,) = commonsense_rows(FILES[name], 1)
    write_lines(tmp_path / f"{FILES[name]}.jsonl", [row])
    (task,) = find_local_tasks([name], tmp_path).tasks
    (doc,) = task.docs
    config = task.config

    def render(template, values):
        return values[template] if template in values else Environment().from_string(template).render(**values)

    expected = render(theirs["doc_to_text"], fields(row["parts"]["question"], row["parts"]["choices"]))
    assert render(config["doc_to_text"], doc) == expected.removeprefix("\n")
    assert {each["metric"] for each in config["metric_list"]} == {each["metric"] for each in theirs["metric_list"]}
    assert theirs.get("target_delimiter", " ") == " "
    assert doc["choices"] == row["parts"]["choices"] or name == "boolq_local"
    if name == "boolq_local":
        assert config["doc_to_choice"] == theirs["doc_to_choice"]


def test_the_eight_are_averaged_and_files_are_known_by_their_hash(model, tokenizer, tmp_path):
    for i, (name, stem) in enumerate(FILES.items()):
        rows = commonsense_rows(stem, 2 + i)
        if name == "piqa_local":  # LLM-Adapters' own layout
            (tmp_path / "piqa").mkdir()
            (tmp_path / "piqa" / "test.json").write_text(json.dumps(rows))
        elif name == "boolq_local":
            (tmp_path / "boolq.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
        elif name == "siqa_local":
            (tmp_path / "social_i_qa.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
        else:
            write_lines(tmp_path / f"{stem}.jsonl", rows)
    local = find_local_tasks(["commonsense_local"], tmp_path)
    scores = score_tasks(model, tokenizer, local=local)
    whole = scores["commonsense_local"]
    assert whole["acc,none"] == pytest.approx(statistics.mean(scores[name]["acc,none"] for name in FILES))
    errors = [scores[name]["acc_stderr,none"] for name in FILES]
    assert whole["acc_stderr,none"] == pytest.approx(math.sqrt(sum(error**2 for error in errors)) / 8)
    assert whole["n"] == sum(range(2, 10))
    files = {file.name: file for file in local.files}
    assert len(files) == 8
    assert files["boolq.jsonl.xz"].rows == 2
    import hashlib

    raw = (tmp_path / "winogrande.jsonl").read_bytes()
    assert files["winogrande.jsonl"].sha256 == hashlib.sha256(raw).hexdigest()
    assert files["winogrande.jsonl"].bytes == len(raw)


def test_limit_takes_the_first_questions(model, tokenizer, tmp_path):
    rows = commonsense_rows("piqa", 6)
    write_lines(tmp_path / "piqa.jsonl", rows)
    first = score_tasks(model, tokenizer, local=find_local_tasks(["piqa_local"], tmp_path), limit=3)
    write_lines(tmp_path / "piqa.jsonl", rows[:3])
    assert first == score_tasks(model, tokenizer, local=find_local_tasks(["piqa_local"], tmp_path))


def test_hellaswag_loses_its_tags_as_in_lm_eval(tmp_path):
    from lm_eval.tasks.hellaswag.utils import preprocess

    raw = "[header] How to sing [title] Open the  mouth. [step] Breathe [substeps] deeply."
    row = commonsense_rows("hellaswag", 1)[0]
    row["instruction"] = row["instruction"].replace(row["parts"]["question"], raw)
    write_lines(tmp_path / "hellaswag.jsonl", [row])
    (task,) = find_local_tasks(["hellaswag_local"], tmp_path).tasks
    assert task.docs[0]["question"] == preprocess(raw).strip()


# --- what is refused -----------------------------------------------------------------------------------------


def piqa(**changes):
    row = commonsense_rows("piqa", 1)[0]
    del row["parts"]
    return {key: value for key, value in {**row, **changes}.items() if value is not None}


def mmlu(**changes):
    return {key: value for key, value in {**mmlu_rows(["virology"], 1)[0], **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lambda: piqa(answer=None), "line 2: field 'answer' is missing"),
        (lambda: piqa(answer="solution3"), "line 2: field 'answer' must be one of solution1, solution2"),
        (lambda: piqa(instruction=7), "line 2: field 'instruction' is int"),
        (lambda: piqa(instruction="Which?"), "line 2: no question of piqa_local"),
        (
            lambda: piqa(instruction=TESTS["piqa_local"]["metadata"]["opening"] + "Why?"),
            "line 2: the instruction does not end in",
        ),
        (
            lambda: piqa(instruction=piqa()["instruction"].replace("Solution2:", "Solution3:")),
            "line 2: the instruction does not end in",
        ),
        (lambda: [1], "line 2: a JSON object was expected, not list"),
    ],
)
def test_a_malformed_commonsense_row_is_named(tmp_path, row, message):
    path = write_lines(tmp_path / "piqa.jsonl", [piqa(), row()])
    with pytest.raises(UserError) as refused:
        find_local_tasks(["piqa_local"], tmp_path)
    assert str(refused.value).startswith(f"{path} {message}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (lambda: mmlu(subject="astrology"), "line 2: 'astrology' is no subject of MMLU"),
        (lambda: mmlu(choices=["a", "b", "c"]), "line 2: field 'choices' must be four strings"),
        (lambda: mmlu(answer=4), "line 2: field 'answer' must be 0, 1, 2 or 3, got 4"),
        (lambda: mmlu(answer=True), "line 2: field 'answer' must be"),
        (lambda: mmlu(answer="B"), "line 2: field 'answer' must be"),
        (lambda: mmlu(question=None), "line 2: field 'question' is missing"),
    ],
)
def test_a_malformed_row_of_mmlu_is_named(tmp_path, row, message):
    path = write_lines(tmp_path / "test.jsonl", [mmlu(), row()])
    write_lines(tmp_path / "dev.jsonl", mmlu_rows(["virology"], 5))
    with pytest.raises(UserError) as refused:
        find_local_tasks(["mmlu_local"], tmp_path)
    assert str(refused.value).startswith(f"{path} {message}")


@pytest.mark.parametrize("array", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path, array):
    rows = commonsense_rows("piqa", 3)
    write_lines(tmp_path / "plain" / "piqa.jsonl", rows)
    text = json.dumps([{key: row[key] for key in ("instruction", "answer")} for row in rows])
    lines = (tmp_path / "plain" / "piqa.jsonl").read_text(encoding="utf-8")
    (tmp_path / "marked").mkdir()
    name = "piqa.json" if array else "piqa.jsonl"
    (tmp_path / "marked" / name).write_text("\ufeff" + (text if array else lines), encoding="utf-8")
    plain, marked = (find_local_tasks(["piqa_local"], tmp_path / each).tasks[0].docs for each in ("plain", "marked"))
    assert plain == marked


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        find_local_tasks(["mmlu_local"], tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no test\.jsonl of MMLU"):
        find_local_tasks(["mmlu_local"], tmp_path)
    write_lines(tmp_path / "test.jsonl", mmlu_rows(["virology"], 1))
    with pytest.raises(UserError, match=r"has no dev\.jsonl of MMLU"):
        find_local_tasks(["mmlu_local"], tmp_path)
    write_lines(tmp_path / "dev.jsonl", mmlu_rows(["virology"], 4))
    with pytest.raises(UserError, match="has 4 examples of virology, not 5"):
        find_local_tasks(["mmlu_local"], tmp_path)
    with pytest.raises(UserError, match="has no questions of astronomy"):
        find_local_tasks(["mmlu_local_astronomy"], tmp_path, shots=0)
    write_lines(tmp_path / "piqa.jsonl", commonsense_rows("piqa", 1))
    with pytest.raises(UserError, match=r"has no boolq\.jsonl, social_i_qa\.jsonl, .*; there are --tasks piqa_local"):
        find_local_tasks(["commonsense_local"], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa.jsonl", b"", "has no rows"),
        ("piqa.jsonl", b'{"instruction": "a"', r"line 1: not JSON"),
        ("piqa.json", b'[{"a": 1}, ]', "not JSON"),
        ("piqa.jsonl", b"\xff\xfe", "is not UTF-8"),
        ("piqa.jsonl.xz", lzma.compress(b"x" * 10_000)[:-8], "is damaged or not whole"),
        ("piqa.jsonl.gz", b"no gzip", "piqa.jsonl.gz"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_local_tasks(["piqa_local"], tmp_path)


def test_a_name_that_is_almost_ours_is_not_searched_in_lm_eval():
    from nlr_lab.evaluation.local import is_local

    assert not is_local("hellaswag")
    assert is_local("mmlu_local_professional_law")
    with pytest.raises(UserError, match="did you mean 'mmlu_local_anatomy'"):
        is_local("mmlu_local_anatomie")
    with pytest.raises(UserError, match="did you mean 'winogrande_local'"):
        is_local("winogrand_local")


# --- the real files ------------------------------------------------------------------------------------------


@pytest.mark.shared_data
def test_every_row_of_mmlu_is_read(shared_data):
    local = find_local_tasks(["mmlu_local"], shared_data)
    assert {task.name.removeprefix("mmlu_local_"): len(task.docs) for task in local.tasks} == SUBJECTS
    assert all(len(task.shots) == 5 for task in local.tasks)
    note = (shared_data / "mmlu" / "NOTE.md").read_text()
    assert all(file.sha256 in note for file in local.files)


@pytest.mark.shared_data
def test_every_row_of_the_commonsense_tests_is_read(shared_data):
    counts = {
        "boolq_local": 3270,
        "piqa_local": 1838,
        "siqa_local": 1954,
        "hellaswag_local": 1000,
        "winogrande_local": 1267,
        "arc_easy_local": 2376,
    }
    local = find_local_tasks(list(counts), shared_data)
    assert {task.name: len(task.docs) for task in local.tasks} == counts
    assert {task.name for task in local.tasks if task.published != len(task.docs)} == {"hellaswag_local"}
    note = (shared_data / "commonsense" / "NOTE.md").read_text()
    assert all(file.sha256 in note for file in local.files)
    with pytest.raises(UserError, match=r"has no ARC-Challenge\.jsonl, openbookqa\.jsonl"):
        find_local_tasks(["commonsense_local"], shared_data)


@pytest.mark.shared_data
def test_a_few_real_questions_by_hand(model, tokenizer, shared_data):
    local = find_local_tasks(["mmlu_local_anatomy", "piqa_local"], shared_data)
    scores = score_tasks(model, tokenizer, local=local, limit=3)

    def rows(path):
        raw = path.read_bytes()
        return map(json.loads, (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode().split("\n")[:-1])

    dev = list(rows(shared_data / "mmlu" / "dev.jsonl.xz"))
    test = [row for row in rows(shared_data / "mmlu" / "test.jsonl.xz") if row["subject"] == "anatomy"][:3]
    hits = [mmlu_choice(model, tokenizer, dev, row) == row["answer"] for row in test]
    assert scores["mmlu_local_anatomy"]["acc,none"] == pytest.approx(sum(hits) / 3)
    hits = []
    for row, _ in zip(rows(shared_data / "commonsense" / "test" / "piqa.jsonl"), range(3), strict=False):
        text = row["instruction"].removeprefix("Please choose the correct solution to the question: ")
        goal, first, second, _ = text.split("\n\n")
        choices = [" " + first.removeprefix("Solution1: "), " " + second.removeprefix("Solution2: ")]
        picked = int(likelihoods(model, tokenizer, f"Question: {goal}\nAnswer:", choices).argmax())
        hits.append(f"solution{picked + 1}" == row["answer"])
    assert scores["piqa_local"]["acc,none"] == pytest.approx(sum(hits) / 3)
