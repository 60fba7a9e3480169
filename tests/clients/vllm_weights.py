"""vLLM's weight transfer with the backend hdpcomm: two ranks train, two workers of vLLM's engine load their weights.

The registry, the engine's base class and the reload of a model layer by layer are vLLM's; its workers, which need a
GPU, are stood in for by processes that make of each call what vllm/v1/worker/gpu_worker.py makes of it.
"""

import importlib.metadata
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.plugins import load_general_plugins

import hdpcomm as hdp
from hdpcomm.comm import Mesh
from hdpcomm.integrations.vllm import WeightSender
from hdpcomm.testing import spawn

WORKERS = 2


def config(kind):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "experts":
        return transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    return transformers.LlamaConfig(**sizes)


class Served(torch.nn.Module):
    """A model as vLLM has it: parameters by the names of the files, filled by ``load_weights``."""

    def __init__(self, shapes):
        super().__init__()
        self.names = {name: f"p{place}" for place, name in enumerate(shapes)}
        for name, shape in shapes.items():
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    def values(self):
        return [x.detach() for x in self.parameters()]

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = own[self.names[name]]
            getattr(parameter, "weight_loader", default_loader)(parameter, tensor)


def default_loader(parameter, tensor):
    parameter.data.copy_(tensor)


def stored(model):
    """Tensors by the names that ``save_pretrained`` writes."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def worker(rank, path, kind):
    load_general_plugins()
    torch.accelerator.synchronize = lambda: None  # vLLM calls it after an update; there is no GPU here
    torch.manual_seed(0)
    shapes = {name: x.shape for name, x in stored(transformers.AutoModelForCausalLM.from_config(config(kind))).items()}
    model = Served(shapes)
    record_metadata_for_reloading(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=rank)
    about = SimpleNamespace(hf_config=config(kind), dtype=torch.bfloat16, quantization=None)
    whole = SimpleNamespace(parallel_config=parallel, model_config=about)
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="hdpcomm"), whole, torch.device("cpu"), model
    )
    with Listener(f"{path}-{rank}", "AF_UNIX") as listener, listener.accept() as line:
        while True:
            name, arguments = line.recv()
            if name == "end":
                line.send({name: own.float().numpy() for name, own in zip(model.names, model.values(), strict=True)})
                return
            if name == "init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(*arguments))
            else:
                getattr(engine, name)(*arguments)
            line.send(None)


class Control:
    """The four calls of ``VLLMWeightSyncClient``, to all workers at a time."""

    def __init__(self, path):
        self.lines = [Client(f"{path}-{rank}", "AF_UNIX") for rank in range(WORKERS)]

    def call(self, name, *arguments):
        for line in self.lines:
            line.send((name, arguments))
        return [line.recv() for line in self.lines]

    def init_weight_transfer_engine(self, told):
        self.call("init_weight_transfer_engine", told)

    def start_weight_update(self):
        self.call("start_weight_update")

    def update_weights(self, told):
        self.call("update_weights", told)

    def finish_weight_update(self):
        self.call("finish_weight_update")


def trainer(path, kind):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with hdp.init() as comm:
        model = hdp.adapt(transformers.AutoModelForCausalLM.from_config(config(kind)))
        planner = hdp.Planner(None, Mesh(comm).cluster(capacity=64), "balanced", hdp.plan.CostModel(1e-9, 1e-7))
        training = hdp.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), planner, comm, zero=1)
        control = Control(path) if comm.rank == 0 else None
        sender = WeightSender(training, comm, control, workers=WORKERS, stage_bytes=20_000, timeout=60)
        tokens = [torch.arange(9), torch.arange(30)]
        for _ in range(2):
            training.step([9, 30], tokens.__getitem__)
            sender.send()
        sender.close()
        wanted = {name: x.bfloat16() for name, x in stored(model.model).items()}
        for loaded in control.call("end") if control else ():
            assert loaded.keys() == wanted.keys()
            for name, x in loaded.items():
                assert (x == wanted[name].float().numpy()).all(), name


def main():
    context = multiprocessing.get_context("spawn")
    for kind in ("dense", "experts"):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/line"
            workers = [context.Process(target=worker, args=(rank, path, kind), daemon=True) for rank in range(WORKERS)]
            for each in workers:
                each.start()
            until = time.monotonic() + 300
            while not all(Path(f"{path}-{rank}").exists() for rank in range(WORKERS)):
                assert time.monotonic() < until, "the workers did not start"
                time.sleep(0.1)
            spawn(trainer, 2, path, kind, timeout=120)
            for each in workers:
                each.join(30)
            assert all(each.exitcode == 0 for each in workers)
    version = importlib.metadata.version("vllm")
    print(f"ok: vllm {version}: {WORKERS} workers have loaded the weights of a Llama and a Mixtral, bit for bit, twice")


if __name__ == "__main__":
    sys.exit(main())
