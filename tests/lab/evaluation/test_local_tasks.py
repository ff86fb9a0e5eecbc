"""MMLU and the commonsense tests over local rows: against log-likelihoods summed by hand in float64."""

import gzip
import hashlib
import json
import lzma
import math
import re
import socket
import statistics
from pathlib import Path

import pytest
import torch
import yaml
from jinja2 import Environment

from nlr_lab.evaluation.harness import score_tasks, task_table
from nlr_lab.evaluation.local_tasks import CATEGORIES, MMLU_TASK, SUBJECTS, TESTS, find_local_tasks, is_local
from refusals import assert_refused
from task_helpers import byte_tokenizer, commonsense_rows, likelihoods, mmlu_rows, tiny_model, write_lines

FILES = {name: test["metadata"]["files"][0] for name, test in TESTS.items()}


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
    import lm_eval

    yaml.SafeLoader.add_constructor("!function", lambda loader, node: None)  # HellaSwag's process_docs
    return yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / path).read_text(encoding="utf-8"))


def mmlu_choice(model, tokenizer, dev, row, shots=5):
    """The likeliest letter after the published 5-shot prompt, written out."""

    def ask(row):
        lines = [row["question"].strip(), *(f"{a}. {b}" for a, b in zip("ABCD", row["choices"], strict=True))]
        return "\n".join([*lines, "Answer:"])

    subject = row["subject"].replace("_", " ")
    examples = [each for each in dev if each["subject"] == row["subject"]][:shots]
    answered = [f"{ask(shot)} {'ABCD'[shot['answer']]}\n\n" for shot in examples]
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    prompt = "".join([head, *answered, ask(row)])
    return int(likelihoods(model, tokenizer, prompt, [f" {letter}" for letter in "ABCD"]).argmax())


@pytest.mark.parametrize("shots", [2, 0])
def test_mmlu_picks_the_letter_that_is_likeliest_by_hand(model, tokenizer, tmp_path, shots):
    dev, test = mmlu_rows(["anatomy", "astronomy"], 6), mmlu_rows(["anatomy"], 6)
    for index, row in enumerate(test):  # each third answer is wrong
        row["answer"] = (mmlu_choice(model, tokenizer, dev, row, shots) + (index % 3 == 0)) % 4
    write_lines(tmp_path / "test.jsonl", test)
    write_lines(tmp_path / "dev.jsonl", dev)
    local = find_local_tasks(["mmlu_local"], tmp_path, shots=shots)
    found = score_tasks(model, tokenizer, local=local, batch_size=3)["mmlu_local_anatomy"]
    assert found["acc,none"] == pytest.approx(4 / 6)
    assert (found["n"], found["published_n"], found["shots"]) == (6, 135, shots)
    assert "truncated" not in found


def test_mmlu_asks_the_subjects_of_lm_eval_as_its_task_file_does():
    counts = {category: sum(subjects.values()) for category, subjects in CATEGORIES.items()}
    assert counts == {"stem": 3018, "humanities": 4705, "social_sciences": 3077, "other": 3242}
    assert (len(SUBJECTS), sum(SUBJECTS.values())) == (57, 14_042)
    theirs = lm_eval_task("mmlu/default/_default_template_yaml")
    for name in ("doc_to_text", "doc_to_choice", "doc_to_target", "output_type", "fewshot_config", "metric_list"):
        assert MMLU_TASK[name] == theirs[name]
    for subject in SUBJECTS:
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
        assert lm_eval_task(f"mmlu/default/mmlu_{subject}.yaml")["description"].startswith(about)


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

    def check(name, values):
        mean, error = statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))
        assert scores[name]["acc,none"] == pytest.approx(mean, abs=1e-12)
        assert scores[name]["acc_stderr,none"] == pytest.approx(error, abs=1e-12)
        assert scores[name]["n"] == len(values)
        return mean, error

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
    assert whole["published_n"] == 14_042
    table = "\n".join(task_table(scores, local.hidden))
    assert "mmlu_local_marketing" not in table
    assert "and 5 subjects, which --out FILE writes" in table
    assert "mmlu_local is 30 questions, the published test 14,042: not comparable" in table


def test_prompts_that_do_not_fit_are_counted_and_limit_takes_the_first(tokenizer, tmp_path):
    write_lines(tmp_path / "dev.jsonl", mmlu_rows(["virology"], 5))
    rows, model = mmlu_rows(["virology"], 6), tiny_model(tokenizer, positions=64)

    def score(rows, **options):
        write_lines(tmp_path / "test.jsonl", rows)
        return score_tasks(model, tokenizer, local=find_local_tasks(["mmlu_local_virology"], tmp_path), **options)

    scores = score(rows[:3])
    assert scores["mmlu_local_virology"]["truncated"] == 3
    assert "3 prompts did not fit" in "\n".join(task_table(scores))
    assert score(rows, limit=3) == scores


def asked(name, row):
    """Contexts and continuations by lm-eval's own rules, written out."""
    question, choices = row["parts"]["question"], row["parts"]["choices"]
    if name == "winogrande_local":
        before, after = question.split("_")
        return [(before + choice, f" {after.strip()}") for choice in choices]
    plain = {"siqa_local": f"Q: {question}\nA:", "hellaswag_local": question, "openbookqa_local": question}
    return [(plain.get(name, f"Question: {question}\nAnswer:"), f" {choice}") for choice in choices]


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
        ("boolq_local", "super_glue/boolq/default.yaml", lambda q: {"passage": "", "question": q.rstrip("?")}),
        ("piqa_local", "piqa/piqa.yaml", lambda q: {"goal": q}),
        ("siqa_local", "siqa/siqa.yaml", lambda q: {"context": q.split()[0], "question": " ".join(q.split()[1:])}),
        ("hellaswag_local", "hellaswag/hellaswag.yaml", lambda q: {"query": q}),
        ("arc_easy_local", "arc/arc_easy.yaml", lambda q: {"question": q}),
        ("openbookqa_local", "openbookqa/openbookqa.yaml", lambda q: {"question_stem": q}),
    ],
)
def test_questions_read_as_in_the_task_files_of_lm_eval(tmp_path, name, path, fields):
    theirs = lm_eval_task(path)
    (row,) = commonsense_rows(FILES[name], 1)
    write_lines(tmp_path / f"{FILES[name]}.jsonl", [row])
    (task,) = find_local_tasks([name], tmp_path).tasks
    (doc,) = task.docs

    def render(template, values):
        return values[template] if template in values else Environment().from_string(template).render(**values)

    expected = render(theirs["doc_to_text"], fields(row["parts"]["question"]))
    assert render(task.config["doc_to_text"], doc) == expected.removeprefix("\n")
    assert {each["metric"] for each in task.config["metric_list"]} == {each["metric"] for each in theirs["metric_list"]}
    assert theirs.get("target_delimiter", " ") == " "
    if name == "boolq_local":
        assert task.config["doc_to_choice"] == theirs["doc_to_choice"]
    else:
        assert doc["choices"] == row["parts"]["choices"]


def test_the_eight_are_averaged_and_files_are_known_by_their_hash(model, tokenizer, tmp_path):
    for count, (name, stem) in enumerate(FILES.items(), start=2):
        rows = commonsense_rows(stem, count)
        if name == "piqa_local":  # LLM-Adapters' own layout
            (tmp_path / "piqa").mkdir()
            (tmp_path / "piqa" / "test.json").write_text(json.dumps(rows))
        elif name == "boolq_local":
            (tmp_path / "boolq.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
        elif name == "siqa_local":
            (tmp_path / "social_i_qa.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
        else:
            path = write_lines(tmp_path / f"{stem}.jsonl", rows)
            if name.startswith("arc"):  # a byte order mark is no part of the rows
                path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
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
    raw = (tmp_path / "winogrande.jsonl").read_bytes()
    assert files["winogrande.jsonl"].sha256 == hashlib.sha256(raw).hexdigest()
    assert files["winogrande.jsonl"].bytes == len(raw)


def test_hellaswag_loses_its_tags_as_in_lm_eval(tmp_path):
    from lm_eval.tasks.hellaswag.utils import preprocess

    raw = "[header] How to sing [title] Open the  mouth. [step] Breathe [substeps] deeply."
    row = commonsense_rows("hellaswag", 1)[0]
    row["instruction"] = row["instruction"].replace(row["parts"]["question"], raw)
    write_lines(tmp_path / "hellaswag.jsonl", [row])
    (task,) = find_local_tasks(["hellaswag_local"], tmp_path).tasks
    assert task.docs[0]["question"] == preprocess(raw).strip()


OPENING = TESTS["piqa_local"]["metadata"]["opening"]
SKIPPED = f"{OPENING}Why?\n\nSolution1: a\n\nSolution3: b\n\nAnswer format: a/b"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("piqa_local", {"answer": None}, "field 'answer' is missing"),
        ("piqa_local", {"answer": "solution3"}, "field 'answer' must be one of solution1, solution2"),
        ("piqa_local", {"instruction": 7}, "field 'instruction' is int"),
        ("piqa_local", {"instruction": "Which?"}, "no question of piqa_local"),
        ("piqa_local", {"instruction": OPENING + "Why?"}, "the instruction does not end in"),
        ("piqa_local", {"instruction": SKIPPED}, "the instruction does not end in"),
        ("mmlu_local", {"subject": "astrology"}, "'astrology' is not an MMLU subject"),
        ("mmlu_local", {"choices": ["a", "b", "c"]}, "field 'choices' must be four strings"),
        ("mmlu_local", {"answer": 4}, "field 'answer' must be 0, 1, 2 or 3, got 4"),
        ("mmlu_local", {"answer": True}, "field 'answer' must be 0, 1, 2 or 3, got True"),
        ("mmlu_local", {"answer": "B"}, "field 'answer' must be 0, 1, 2 or 3, got 'B'"),
        ("mmlu_local", {"question": None}, "field 'question' is missing"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, name, changes, message):
    good = commonsense_rows("piqa", 1)[0] if name == "piqa_local" else mmlu_rows(["virology"], 1)[0]
    bad = {key: value for key, value in {**good, **changes}.items() if value is not None}
    path = write_lines(tmp_path / ("piqa.jsonl" if name == "piqa_local" else "test.jsonl"), [good, bad])
    write_lines(tmp_path / "dev.jsonl", mmlu_rows(["virology"], 5))
    assert_refused(re.escape(f"{path}, line 2: {message}"), find_local_tasks, [name], tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("mmlu_local", {}, r"has no test\.jsonl of MMLU"),
        ("mmlu_local", {"test": 1}, r"has no dev\.jsonl of MMLU"),
        ("mmlu_local", {"test": 1, "dev": 4}, "has 4 examples of virology, not 5"),
        ("mmlu_local_astronomy", {"test": 1, "dev": 5}, "has no questions of astronomy"),
        ("commonsense_local", {"piqa": 1}, r"has no boolq\.jsonl, social_i.*; there are --tasks piqa_local"),
    ],
)
def test_missing_files_are_named(tmp_path, name, rows, message):
    for stem, count in rows.items():
        made = commonsense_rows(stem, count) if stem == "piqa" else mmlu_rows(["virology"], count)
        write_lines(tmp_path / f"{stem}.jsonl", made)
    assert_refused(message, find_local_tasks, [name], tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("piqa.jsonl", b"", "has no rows"),
        ("piqa.jsonl", b'{"instruction": "a"', "line 1 is not JSON"),
        ("piqa.jsonl", b"\n[1]\n", "record 1: must be a JSON object, got int"),
        ("piqa.jsonl", b"7\n", r"line 1: must be a JSON object, got int"),
        ("piqa.json", b'[{"a": 1}, ]', "piqa.json is not JSON"),
        ("piqa.jsonl", b"\xff", "is not UTF-8"),
        ("piqa.jsonl.xz", lzma.compress(b"x" * 10_000)[:-8], "cannot read .*piqa.jsonl.xz"),
        ("piqa.jsonl.gz", b"no gzip", "piqa.jsonl.gz"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert_refused(message, find_local_tasks, ["piqa_local"], tmp_path)


def test_a_name_that_is_almost_ours_is_not_searched_in_lm_eval():
    assert not is_local("hellaswag")
    assert is_local("mmlu_local_professional_law")
    for wrong, right in (("mmlu_local_anatomie", "mmlu_local_anatomy"), ("winogrand_local", "winogrande_local")):
        assert_refused(f"did you mean '{right}'", is_local, wrong)


@pytest.mark.shared_data
def test_every_row_of_the_real_files_is_read(shared_data):
    local = find_local_tasks(["mmlu_local"], shared_data)
    assert {task.name.removeprefix("mmlu_local_"): len(task.docs) for task in local.tasks} == SUBJECTS
    assert all(len(task.shots) == 5 for task in local.tasks)
    counts = {"boolq_local": 3270, "piqa_local": 1838, "siqa_local": 1954}
    counts |= {"hellaswag_local": 1000, "winogrande_local": 1267, "arc_easy_local": 2376}
    others = find_local_tasks(list(counts), shared_data)
    assert {task.name: len(task.docs) for task in others.tasks} == counts
    assert {task.name for task in others.tasks if task.published != len(task.docs)} == {"hellaswag_local"}
    for folder, found in (("mmlu", local), ("commonsense", others)):
        note = (shared_data / folder / "NOTE.md").read_text()
        assert all(file.sha256 in note for file in found.files)
    assert_refused(r"has no ARC-Challenge\.jsonl, openb", find_local_tasks, ["commonsense_local"], shared_data)
