"""The release gate: every input it takes, every outcome, and one clear line for what it cannot use."""

import csv
import json

import numpy as np
import pytest

from experiments.check import main
from phase_jax.errors import UserError
from phase_jax.statistics import gap_interval, simulate, worst_interval

TRUTH = np.tile([0.9, 0.9, 0.9, 0.7], 2)


@pytest.fixture(scope="module")
def sweep():
    rng = np.random.default_rng(0)
    correct = simulate(TRUTH, 500, 0.3, rng)
    return correct, rng.exponential(size=correct.shape)


def records(correct, nll=None):
    rows = []
    for i, row in enumerate(correct):
        for r, value in enumerate(row):
            rows.append({"logical_id": f"s{i}", "residue": r, "correct": int(value)})
            if nll is not None:
                rows[-1]["nll"] = float(nll[i, r])
    return rows


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.fixture
def forms(tmp_path, sweep):
    """The same sweep in every form."""
    correct, nll = sweep
    shuffled = records(correct, nll)
    np.random.default_rng(1).shuffle(shuffled)
    npz = tmp_path / "run" / "evaluations" / "prefix.npz"
    npz.parent.mkdir(parents=True)
    np.savez(npz, correct=correct, nll=nll, target_position=np.zeros(3))
    nested = {"correct": correct.astype(int).tolist(), "nll": nll.tolist(), "stride": 4}
    return [
        write_csv(tmp_path / "a.csv", shuffled),
        write(tmp_path / "b.json", json.dumps(shuffled)),
        write(tmp_path / "c.json", json.dumps(nested)),
        str(npz),
        str(tmp_path / "run"),
    ]


def test_every_form_gives_the_same_bounds(forms, sweep, capsys):
    low, high = worst_interval(sweep[0])
    gap_low, gap_high = gap_interval(sweep[0])
    for form in forms:
        assert main([form, "--min-worst", "0.6", "--max-gap", "0.35", "--max-nll-quantile", "0.5:3"]) == 0
        said = capsys.readouterr().out
        assert form in said and "500 logical samples, 8 residues" in said
        assert f"worst {sweep[0].mean(axis=0).min():.4f}" in said and f"[{low:.4f}, " in said
        if form in forms[:2]:  # rows come in another order, and resamples with them
            continue
        assert f"[{low:.4f}, {high:.4f}]" in said and f"[{gap_low:.4f}, {gap_high:.4f}]" in said


@pytest.mark.parametrize(
    ("limits", "code", "bound"),
    [
        (["--min-worst", "0.6"], 0, "even the lower bound"),
        (["--min-worst", "0.8"], 1, "even the upper bound"),
        (["--min-worst", "0.7"], 3, "more logical samples"),
        (["--max-gap", "0.35"], 0, "even the upper bound"),
        (["--max-gap", "0.1"], 1, "even the lower bound"),
        (["--max-gap", "0.2"], 3, "more logical samples"),
        (["--max-nll-quantile", "0.5:3"], 0, "even the lower bound"),
        (["--max-nll-quantile", "0.9:0.5"], 1, "even the upper bound"),
        (["--max-nll-quantile", "0.95:3"], 3, "more logical samples"),
        (["--min-worst", "0.6", "--max-gap", "0.2"], 3, "undecided"),
        (["--min-worst", "0.7", "--max-gap", "0.1"], 1, "fail"),
        (["--min-worst", "0.64", "--confidence", "0.5"], 0, "50 % interval"),
    ],
)
def test_outcomes(forms, limits, code, bound, capsys):
    assert main([forms[3], *limits]) == code
    assert bound in capsys.readouterr().out


def test_stride_names_the_phase(forms, capsys):
    main([forms[2], "--min-worst", "0.6"])
    assert "of stride 4)" in capsys.readouterr().out


def test_folder_checks_each_evaluation(forms, sweep, tmp_path, capsys):
    np.savez(tmp_path / "run" / "evaluations" / "insequence.npz", correct=np.zeros_like(sweep[0]))
    assert main([forms[4], "--min-worst", "0.6"]) == 1
    said = capsys.readouterr().out
    assert "prefix.npz" in said and "insequence.npz" in said


def test_tiny_samples_are_undecided(tmp_path):
    path = write_csv(tmp_path / "one.csv", records(np.ones((1, 8), bool)))
    assert main([path, "--min-worst", "0.6", "--max-gap", "0.1"]) == 3


HEAD = "logical_id,residue,correct\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "no data rows"),
        ("a.csv", HEAD, "no data rows"),
        ("a.csv", "id,residue,correct\n0,0,1\n", "data row 1 has no logical_id"),
        ("a.csv", HEAD + "0,0,1\n0,1,\n", "data row 2 has no correct"),
        ("a.csv", HEAD + "0,0,1\n0,1,nan\n", "data row 2: correct is 'nan'; it must be 0 or 1"),
        ("a.csv", HEAD + "0,0,1\n0,1,0.7\n", "it must be 0 or 1"),
        ("a.csv", HEAD + "0,x,1\n", "residue 'x' is not a finite number"),
        ("a.csv", HEAD + "0,-1,1\n", "residue -1 is not a whole number"),
        ("a.csv", HEAD + "0,0,1\n0,1,1\n0,0,1\n", "data row 3 repeats logical_id 0, residue 0"),
        ("a.csv", HEAD + "0,0,1\n0,1,1\n1,0,1\n", "logical_id 1 has no residue 1"),
        ("a.csv", HEAD + "0,0,1\n0,2,1\n", "logical_id 0 has no residue 1; every sample needs residues 0 to 2"),
        ("a.csv", HEAD + "0,0,1\n1,0,1\n", "at least 1 logical sample and 2 residues"),
        ("a.csv", "logical_id,residue,correct,nll\n0,0,1,1\n0,1,1,nan\n", "nll 'nan' is not a finite number"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "3", "expected"),
        ("a.json", "[1]", "record 1 is not a record"),
        ("a.json", '{"correct": [[1, 0], [1]]}', "rows differ in length"),
        ("a.json", '{"correct": [[1, NaN]]}', "NaN at logical sample 0, residue 1"),
        ("a.json", '{"correct": [[1, null]]}', "NaN|0 or 1"),
        ("a.json", '{"correct": [[1, 0, 1]], "stride": 2}', "stride 2 does not divide the 3 residues"),
        ("a.json", '{"correct": [[1, 0]], "stride": "8"}', "stride '8' is not a whole number"),
        ("a.json", '{"correct": [[1, 0]], "nll": [[1]]}', "nll: expected the shape"),
        ("a.npz", "not a zip", "not a readable .npz"),
        ("a.txt", "x", "expected a run folder or a file"),
    ],
)
def test_unusable_input_is_one_clear_line(tmp_path, name, text, message):
    path = write(tmp_path / name, text)
    with pytest.raises(UserError, match=message) as error:
        main([path, "--min-worst", "0.5", "--max-gap", "0.5"])
    assert path in str(error.value) and "\n" not in str(error.value)


def test_other_mistakes(tmp_path, forms):
    cases = [
        ([str(tmp_path / "none"), "--min-worst", "0.5"], "no such file"),
        ([str(tmp_path), "--min-worst", "0.5"], "no evaluations"),
        ([forms[0]], "nothing to check"),
        ([forms[0], "--min-worst", "60"], "not percent"),
        ([forms[0], "--max-gap", "nan"], "--max-gap"),
        ([forms[0], "--max-gap", "0.1", "--confidence", "95"], "--confidence"),
    ]
    for argv, message in cases:
        with pytest.raises(UserError, match=message):
            main(argv)
    np.savez(tmp_path / "other.npz", wrong=np.zeros(3))
    with pytest.raises(UserError, match="no array named correct"):
        main([str(tmp_path / "other.npz"), "--min-worst", "0.5"])
    np.savez(tmp_path / "plain.npz", correct=np.ones((3, 4)))
    with pytest.raises(UserError, match="no NLLs stored"):
        main([str(tmp_path / "plain.npz"), "--max-nll-quantile", "0.9:1"])
    for text in ("0.9", "2:1", "0.9:x", "0.9:nan"):
        with pytest.raises(SystemExit) as stopped:
            main([forms[0], "--max-nll-quantile", text])
        assert stopped.value.code == 2


def test_installed_verb_exits_with_two(tmp_path, capsys):
    from experiments.cli import main as phase_jax

    assert phase_jax(["check", str(tmp_path / "none.csv"), "--min-worst", "0.5"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
