"""`convert`, `verify` and `inspect`: what the command does, from Python."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dtshard


def test_conversion_is_verified_and_loads_in_pytorch(fixtures, tmp_path):
    source = fixtures / "titan"
    seen = []
    report = dtshard.convert(
        "reshard", source, tmp_path / "dcp", to="dcp", mesh={"dp": 2, "tp": 2}, include=["model.**"],
        placements={"**.q_proj.weight": "S(0),S(1)", "**": "S(0),R"}, progress=lambda *counts: seen.append(counts),
    )  # fmt: skip
    assert report["target"]["format"] == "dcp" and seen[-1][0] == seen[-1][1]
    truth = load_file(fixtures / "titan.truth.safetensors")
    state = {name: torch.zeros_like(value) for name, value in truth.items() if name.startswith("model.")}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert state and all(torch.equal(value, truth[name]) for name, value in state.items())
    assert dtshard.verify(tmp_path / "dcp", fixtures / "titan.truth.safetensors", common=True)["same"]


def test_difference_is_a_result_and_not_an_error(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "one.pt")
    torch.save({"w": torch.zeros(3)}, tmp_path / "two.pt")
    found = dtshard.verify(tmp_path / "one.pt", tmp_path / "two.pt")
    assert found["same"] is False and len(found["different"]) == 1


def test_dry_run_writes_nothing(fixtures, tmp_path):
    plan = dtshard.convert("consolidate", fixtures / "titan", tmp_path / "out", dry_run=True)
    assert plan["files"] and list(tmp_path.iterdir()) == []


def test_inspect_gives_the_document_of_the_command(fixtures):
    document = dtshard.inspect(fixtures / "titan", brief=True)
    assert document["format"] == "dcp" and document["tensors"]


def test_reports_are_written(fixtures, tmp_path):
    source, report = fixtures / "titan", tmp_path / "report.html"
    for write in [
        lambda: dtshard.inspect(source, html=report),
        lambda: dtshard.verify(source, fixtures / "titan.truth.safetensors", html=report),
        lambda: dtshard.convert("reshard", source, tmp_path / "out", mesh="fsdp=2", dry_run=True, html=report),
    ]:
        write()
        assert report.read_text().startswith("<!DOCTYPE html>")
        report.unlink()


def test_report_does_not_replace_a_file_of_a_checkpoint(tmp_path):
    source = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3)}, source)
    before = source.read_bytes()
    for write in [lambda: dtshard.inspect(source, html=source), lambda: dtshard.verify(source, html=source)]:
        with pytest.raises(dtshard.Error, match="no HTML page"):
            write()
    assert source.read_bytes() == before


def test_values_of_other_types_are_a_type_error(fixtures):
    for value in [{"**"}, b"**", (item for item in ["**"])]:
        with pytest.raises(TypeError, match="include"):
            dtshard.open(fixtures / "titan", include=value)
    with pytest.raises(dtshard.Error, match="include: the list is empty"):
        dtshard.open(fixtures / "titan", include=[])
    with pytest.raises(TypeError, match="progress"):
        dtshard.verify(fixtures / "titan", progress=5)


def test_notes_go_to_the_logger(fixtures, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "dtshard"):
        dtshard.convert("reshard", fixtures / "fsdp4/dcp", tmp_path / "out", mesh="dp=2,tp=2", placements="S(0),R")
    assert any("scalars are replicated" in record.message for record in caplog.records)


def test_errors_spell_options_as_keywords(fixtures, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(dtshard.Error) as raised:
        dtshard.convert("consolidate", fixtures / "titan", tmp_path / "out")
    assert "--" not in f"{raised.value} {raised.value.hint}"
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    with pytest.raises(dtshard.Error, match="no such verb"):
        dtshard.convert("transmogrify", fixtures / "titan", tmp_path / "x")
    with pytest.raises(dtshard.Error, match="not a verb that converts"):
        dtshard.convert("verify", fixtures / "titan")
    with pytest.raises(TypeError, match="flag"):
        dtshard.convert("consolidate", fixtures / "titan", tmp_path / "x", overwrite="yes")


def test_callback_that_raises_stops_the_conversion(fixtures, tmp_path):
    def fail(done, total):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dtshard.convert("consolidate", fixtures / "titan", tmp_path / "out", progress=fail)
