"""Weights from a trainer's mesh to workers that want the model whole, some layers at a time."""

from __future__ import annotations

import copy
import threading
from multiprocessing.connection import Client, Listener

import pytest
import torch
import transformers

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.errors import InvalidUsage
from hdpcomm.integrations.vllm import WeightSender, WeightStages, join_workers
from hdpcomm.testing import run_threads, spawn
from tests.harness.mesh_shapes import SHAPES, trainer_of

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip


def boxes(part):
    return [x for _, x in part.boxes]


@pytest.mark.parametrize(("shape", "zero"), [("hdp 2 pp 2", 0), ("hdp 2 tp 2", 1), ("hdp 2 pp 2", 3)])
@pytest.mark.parametrize("stage_bytes", [1, 4000, 1 << 30])
def test_stages_from_a_mesh(shape, zero, stage_bytes):
    """Four ranks train; two others get all tensors in bfloat16, twice, the second time with other values."""

    def main():
        torch.set_num_threads(1)
        with hdp.init() as world:
            trains = world.subset([0, 1, 2, 3])
            plain = trainer_of(world.subset([world.rank]), SHAPES["hdp 2 pp 2"]._replace(hdp=1, pipeline=1))
            whole = {name: x.clone() for name, x in plain.state_dict()["model"].items()}
            source = None
            if trains is not None:
                source = trainer_of(trains, SHAPES[shape], zero=zero).checkpoint_state()["model"]
            shapes = {name: x.shape for name, x in whole.items()}
            stages = WeightStages(shapes, world, source, dtype=torch.bfloat16, stage_bytes=stage_bytes)
            for factor in (1, 2):
                got = {}

                def load(layer, got=got):
                    assert not got.keys() & layer.keys()
                    got.update({name: x.clone() for name, x in layer.items()})

                stages.run(load)
                if source is None:
                    assert got.keys() == whole.keys()
                    for name, x in got.items():
                        assert torch.equal(x, (factor * whole[name]).bfloat16()), name
                else:
                    assert not got
                    held = [x for part in source.values() for x in ([part] if torch.is_tensor(part) else boxes(part))]
                    with torch.no_grad():
                        for x, twice in [(x, 2 * x) for x in held]:  # some are views of others
                            x.copy_(twice)
            return stages.bytes_sent

    sent = run_threads(main, 6)
    assert all(sent[:4]), "who trains shares the work"
    assert sent[4:] == [0, 0]


class Control:
    """vLLM's part, in which rank 0 calls the worker's process."""

    def __init__(self, path):
        self._line = Client(path, "AF_UNIX")

    def __getattr__(self, name):
        def call(*arguments):
            self._line.send((name, arguments))
            if (error := self._line.recv()) is not None:
                raise error

        return call


class Worker:
    """What vLLM makes of each call, without vLLM."""

    def __init__(self, model, fails):
        self.model, self.fails, self.calls = model, fails, []

    def init_weight_transfer_engine(self, told):
        self.calls.append("init")
        assert told["dtype"] == "float32"
        world, self.store = join_workers(told["place"], told["trainers"])
        shapes = dict(zip(told["names"], told["shapes"], strict=True))
        self.stages = WeightStages(shapes, world, None, dtype=torch.float32, stage_bytes=told["stage_bytes"])

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, told):
        assert told == {}
        self.calls.append("update")
        if len(self.calls) > 7:
            self.stages.run(self.refuse if self.fails else self.load)
            threading.Event().wait(5)  # it has got all, and does not answer
        self.stages.run(self.load)

    def load(self, layer):
        self.model.load_state_dict(layer, strict=False)

    def refuse(self, layer):
        assert layer
        raise ValueError("no room for it")

    def finish_weight_update(self):
        self.calls.append("finish")


def serve(listener, worker):
    line = listener.accept()
    while True:
        try:
            name, arguments = line.recv()
        except (EOFError, ConnectionError):
            return
        error = None
        try:
            getattr(worker, name)(*arguments)
        except Exception as failure:
            error = failure
        try:
            line.send(error)
        except ConnectionError:  # nobody waits for it any more
            return


def program(path, started):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(CONFIG)
    with hdp.init() as world:
        trains = world.subset([0, 1])
        listener = None if trains is not None else Listener(path, "AF_UNIX")
        world.barrier()
        if trains is None:
            with torch.no_grad():
                other = copy.deepcopy(model)
                for p in other.parameters():
                    p.zero_()
            worker = Worker(other, started == "a worker fails")
            serve(listener, worker)
            return worker.calls, {name: x.clone() for name, x in other.state_dict().items()}
        adapted = hdp.adapt(model)
        planner = hdp.Planner(None, Mesh(trains).cluster(capacity=64), "balanced", hdp.plan.CostModel(1e-9, 1e-7))
        trainer = hdp.Trainer(adapted, torch.optim.SGD(adapted.parameters(), lr=0.1), planner, trains, zero=1)
        control = Control(path) if trains.rank == 0 else None
        sender = WeightSender(trainer, trains, control, workers=1, dtype=torch.float32, stage_bytes=4000, timeout=60)
        if started == "a worker does not answer":
            sender._timeout = 1.0
        tokens = [torch.arange(9), torch.arange(30)]
        for _ in range(2):
            trainer.step([9, 30], tokens.__getitem__)
            sender.send()
        found = {name: x.clone() for name, x in adapted.model.state_dict().items()}
        trouble = None
        if started != "well":
            try:
                sender.send()
            except (ValueError, hdp.Error) as error:
                trouble = type(error).__name__, str(error)
        sender.close()
        if control is not None:
            control._line.close()
        return found, trouble


@pytest.mark.parametrize("started", ["well", "a worker fails", "a worker does not answer"])
def test_a_sender_and_a_worker_of_another_process(started, tmp_path):
    (first, trouble), (second, others), (calls, loaded) = spawn(
        program, 3, str(tmp_path / "line"), started, timeout=100
    )
    assert calls[:7] == ["init", *["start", "update", "finish"] * 2]
    assert loaded.keys() == first.keys()
    for name, x in loaded.items():
        assert torch.equal(x, first[name]), name
        assert torch.equal(x, second[name]), name
    if started == "a worker fails":
        assert trouble == ("ValueError", "no room for it")
        assert others[0] in ("Aborted", "PeerLost")
        assert "no room for it" in others[1]
    if started == "a worker does not answer":
        assert trouble[0] == "CommTimeout"
        assert "rank 0 has no answer of vLLM's workers to update_weights() 1.0 s after" in trouble[1]
        assert others is None


def test_bad_arguments():
    with hdp.init() as comm, pytest.raises(InvalidUsage, match="no client"):
        WeightSender(None, comm, None, workers=1)
    with hdp.init() as comm, pytest.raises(InvalidUsage, match="workers"):
        WeightSender(None, comm, None, workers=0)
    for address in ("192.0.2.1", "no such host"):
        with hdp.init() as comm, pytest.raises(InvalidUsage, match=f"the address '{address}', at which rank 0 cannot"):
            WeightSender(None, comm, Control, workers=1, address=address)


def test_tensors_that_are_no_floating_point_are_named():
    class Holder:
        def checkpoint_state(self):
            return {"model": {"model.places": torch.arange(3)}}

    with hdp.init() as comm, pytest.raises(InvalidUsage, match=r"places \(torch.int64\)"):
        WeightSender(Holder(), comm, Control, workers=1)
