"""The published numbers are those of the facts beside the references."""

import json

import pytest

from nlr_lab.reproduce import tables

TABLES = tables()

pytestmark = pytest.mark.shared_data


@pytest.fixture
def facts(shared_data):
    return json.loads((shared_data.parent / "facts" / "published_results.json").read_text())


def rows_of(name):
    """All published values, row by row."""
    return list(TABLES[name].rows.values())


def column(name, *columns):
    """Values of a table's columns, row by row."""
    table = TABLES[name]
    places = [list(table.columns).index(each) for each in columns]
    return [tuple(values[place] for place in places) for values in table.rows.values()]


def test_noble(facts):
    fact = facts["noble_table1_llm_openwebtext"]
    rows = [row[2:] for key in ("base_250m_12L_1024d", "large_1_5b_24L_2048d") for row in fact[key]]
    assert rows_of("noble/table1") == rows
    assert [ms for (ms,) in column("noble/step-times", "step_ms")] == list(fact["base_step_ms_8xH100_batch64"].values())
    assert rows_of("noble/table2") == [row[2:] for row in facts["noble_table2_bert_mlm"]]
    assert rows_of("noble/table3") == [row[2:] for row in facts["noble_table3_vit_s_imagenet"]["rows"]]
    assert [loss for (loss,) in column("noble/table4", "eval_loss")] == [
        row[2] for row in facts["noble_table4_image_tokens"]
    ]
    fact = facts["noble_table5_activation_ablation"]
    losses = [fact["baseline"], *(loss for row in fact["rows"] for loss in row[1:]), fact["cosine_three_layer"]]
    assert [loss for (loss,) in column("noble/table5", "eval_loss")] == losses


def test_notes_and_queries(facts):
    fact = facts["noble_notes_c4"]
    assert rows_of("notes/c4") == [row[1:] for row in fact["rows"]]
    assert rows_of("notes/glue") == [row[1:] for row in fact["glue_roberta"]["rows"]]
    assert rows_of("notes/latency") == [row[1:] for row in fact["decode_latency_ms"]["rows"]]
    fact = facts["nonlinear_queries_gpt3_small_owt_60k"]
    assert rows_of("query/results") == [row[1:] for row in fact["rows"]]


def test_nora(facts):
    assert rows_of("nora/table1") == [row[1:] for row in facts["nora_table1_vit_tiny_cifar"]["rows"]]
    averages = [average for _, *both in facts["nora_table2_mmlu_llama3_8b_avg"]["rows"] for average in both]
    assert [average for (average,) in column("nora/table2", "avg")] == averages
    for name, fact in (("table3", "table3_learnable_activations"), ("table4", "table4_tuning_strategies")):
        assert rows_of(f"nora/{name}") == [[score] for score in facts[f"nora_{fact}_cifar100"].values()]
    assert rows_of("nora/table5") == [row[2:] for row in facts["nora_table5_selective_perturbation"]["rows"]]
    assert rows_of("nora/table6") == [row[1:] for row in facts["nora_table6_cost_vit_tiny"]["rows"]]


def test_sine(facts):
    assert rows_of("sine/table1") == [row[2:] for row in facts["sine_table1_glue_deberta_v3_base_qv"]["rows"]]
    rates = facts["sine_table1_glue_deberta_v3_base_qv"]["lr_epochs_as_printed_unlabelled"]
    assert rows_of("sine/table4") == rates
    fact = facts["sine_table2_llama3_8b_commonsense_avg"]
    for name in ("sine/table2", "sine/table2-one-dropout"):
        averages = [average for _, _, *both in fact["rows"] for average in both]
        assert [average for (average,) in column(name, "avg")] == averages
    assert rows_of("sine/table5") == list(fact["omega_lr_epochs_by_rank"].values())
    fact = facts["sine_table3_nerf_llff_psnr_avg"]
    assert column("sine/table3", "avg", "Fern")[0] == (fact["full_rank"], fact["fern_full_rank"])
    pairs = [
        pair for _, low, sine, size, fern, ferns in fact["rows"] for pair in ((low, fern, size), (sine, ferns, size))
    ]
    assert column("sine/table3", "avg", "Fern", "size_pct")[1:] == pairs
    assert column("sine/fig5", "bd_rate_pct", "bd_psnr_db") == [(fact["bd_rate_pct"], fact["bd_psnr_db"])]
    assert rows_of("sine/table6") == [row[1:] for row in facts["sine_table6_training_memory_gb_llama3_8b"]["rows"]]
    assert [hours for (hours,) in column("sine/hours", "hours")] == list(facts["sine_hours_llama3_8b_h100"].values())
    rows = facts["sine_table7_8_dora"]["rows"]
    for name in ("sine/table7", "sine/table7-one-dropout", "sine/table7-released"):
        assert column(name, "trained_body_m", "avg") == [
            pair for row in rows for pair in ((row[1], row[2]), (row[1], row[3]))
        ]
    assert rows_of("sine/table8") == [row[4:] for row in rows]
    fact = facts["sine_table9_omega_by_rank"]
    omegas = [*fact["vit_small_cifar100"].values(), *fact["vit_base_imagenet"].values()]
    assert [omega for (omega,) in column("sine/table9", "omega")] == omegas
    fact = facts["sine_table10_vit_small_k1_omega_ablation_top1"]
    assert [top for (top,) in column("sine/table10", "top1_pct")] == list(fact.values())
    assert rows_of("sine/table11") == [row[1:] for row in facts["sine_table11_convnext_tiny_cifar100"]["rows"]]
    fact = facts["sine_table12_nerf_training_memory_mb"]
    assert rows_of("sine/table12") == [fact["low_rank"], fact["sine"]]
    fact = facts["sine_table13_occupancy_iou"]
    for name in ("sine/table13", "sine/table13-released"):
        rows = [
            (size, *ious, percent) for _, _, size, percent, *both in fact["rows"] for ious in (both[0::2], both[1::2])
        ]
        columns = ("params_k", "Thai", "Lucy", "Dragon", "size_pct")
        assert column(name, *columns) == [(*fact["full_rank"].values(), 100), *rows]
