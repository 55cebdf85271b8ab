"""What a bounded strategy drops in training is told; evaluation and the sample drop nothing."""

import pytest

import moezoo


@pytest.mark.parametrize(("dispatch", "bound"), [("capacity", "capacity_factor"), ("ragged", "buffer_factor")])
def test_drops_are_told_and_nothing_is_dropped_after_training(tiny, capsys, dispatch, bound):
    chosen = (f"dispatch={dispatch}", f"dispatch.{bound}=0.5")
    run = moezoo.train(moezoo.compose(*tiny, "mesh=fsdp2_ep4", "steps=2", *chosen))
    out = capsys.readouterr().out
    assignments = 2 * 8 * 16 * 2  # layers, sequences, tokens, experts a token
    for row in run.history:
        assert row["dropped"] == sum(row["dropped_by_layer"]) > 0
        assert len(row["dropped_by_layer"]) == 2
        share = f"dropped {row['dropped'] / assignments:.1%}"
        assert f"step {row['step']}/2  loss {row['loss']:.4f}  {share}" in out
    first = run.history[0]
    layers = " ".join(map(str, first["dropped_by_layer"]))
    wanted = f"warning: step 1 dropped {first['dropped']} of {assignments} assignments, layer by layer {layers}; "
    assert out.count("warning:") == 1
    assert wanted + f"dispatch.{bound} sets how many find room, null for all\n" in out
    assert run.evaluation.dropped == 0
    exact = moezoo.evaluate(run.model, moezoo.compose(*tiny, "mesh=fsdp2_ep4", "dispatch=ring"))
    assert run.evaluation.loss == pytest.approx(exact.loss, rel=1e-6)
