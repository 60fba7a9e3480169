"""accelerate launch: Accelerator(cpu=True) with DDP, its gathers and its clipping."""

from __future__ import annotations

from common import Figures, batches, figures_of, join, leave, main, tiny_llama

# --multi_gpu is accelerate's word for "by torchrun"; for several processes on CPUs it knows MPI only.
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "{ranks}", "--num_machines", "1",
          "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")  # fmt: skip


def work(backend: str) -> Figures:
    import torch
    from accelerate import Accelerator

    join(backend)  # before Accelerator(), which would take gloo
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    data = torch.utils.data.DataLoader(batches(0, 1, rows=32)[0], batch_size=4)
    model = tiny_llama()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data)
    losses, norms = [], []
    for tokens in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        losses += accelerator.gather(loss.detach()[None]).tolist()
    weights = figures_of(accelerator.unwrap_model(model))
    leave(backend)
    return {"losses": losses, "gradient norms": norms, "weights": weights}


if __name__ == "__main__":
    main(work, against="gloo", packages=["torch", "accelerate"], launcher=LAUNCH)
