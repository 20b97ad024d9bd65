"""Options as Lightning, lightning-hydra-template and timm spell them, and ours."""

from __future__ import annotations

import re
from collections.abc import Container

_SMOKE, _DATA = "debug=smoke", "data=imagefolder data.root=@"
_AUGMENT = "data.augment.mixup=0.2, or its crops, flip and cutmix: there are no others"
_WEIGHTS = "+model.checkpoint_path=@ for its weights; train --resume RUN_DIR continues a run"

# KEY or KEY=VALUE -> what to write; @ is the value. Keys whose last part is ours, such as lr,
# need no row: the nearest key is suggested anyway.
SPELLINGS = {
    **dict.fromkeys(("aa", "auto_augment", "reprob", "color_jitter", "hflip", "vflip"), _AUGMENT),
    **dict.fromkeys(("fp16", "use_amp"), "precision=bf16"),
    **dict.fromkeys(("gpu", "cuda"), "trainer.accelerator=gpu"),
    **dict.fromkeys(("grad_clip", "max_grad_norm"), "trainer.gradient_clip_val=@"),
    "resume_from_checkpoint": _WEIGHTS,
    "use_ema": "'callbacks.ema={decay: 0.999}'",
    "warmup_steps": "optim.schedule.warmup=0.1, a fraction of the run",
    "accumulate_grad": "trainer.accumulate_grad_batches=@",
    "amp": "precision=bf16",
    "arch": "model=@",
    "callbacks=early_stopping": "'callbacks.early_stopping={patience: 10}'",
    "callbacks=model_checkpoint": "callbacks.best_checkpoint.monitor=val/acc",
    "checkpoint": _WEIGHTS,
    "ckpt": _WEIGHTS,
    "ckpt_path": _WEIGHTS,
    "clip_grad": "trainer.gradient_clip_val=@",
    "compile": "'callbacks.compiled_branches={}'",
    "data.data_dir": _DATA,
    "data_dir": _DATA,
    "data_path": _DATA,
    "dataset": "data=@",
    "debug=default": _SMOKE,
    "debug=fdr": _SMOKE,
    "debug=limit": _SMOKE,
    "debug=profiler": "trainer.profiler=simple",
    "device": "trainer.accelerator=@",
    "drop": "model.drop_rate=@",
    "drop_path": "model.drop_path_rate=@",
    "eval_metric": "callbacks.best_checkpoint.monitor=val/acc",
    "fast_dev_run": _SMOKE,
    "gpus": "trainer.accelerator=gpu trainer.devices=@",
    "grad_accum_steps": "trainer.accumulate_grad_batches=@",
    "hparams_search": "revzoo sweep, which searches ranges such as 'optim.lr=interval(0.01,1)'",
    "img_size": "data.image_size=@",
    "initial_checkpoint": _WEIGHTS,
    "input_size": "data.image_size=@",
    "learning_rate": "optim.lr=@",
    "log_interval": "trainer.log_every_n_steps=@",
    "logger.wandb.project": "logger=wandb logger.project=@",
    "lr_scheduler": "optim=@",
    "min_lr": "optim.schedule.end=0.01, a fraction of the rate",
    "model.compile": "'callbacks.compiled_branches={}'",
    "model_ema": "'callbacks.ema={decay: 0.999}'",
    "model_ema_decay": "'callbacks.ema={decay: @}'",
    "opt": "optim=@",
    "optim.scheduler.name": "optim.schedule.name=@",
    "optim=adam": "optim=adamw",
    "optim=lamb": "optim=adamw",
    "optim=momentum": "optim=onecycle, cosine or step: SGD with this schedule",
    "optim=sgd": "optim=onecycle, cosine or step: SGD with this schedule",
    "optimizer": "optim=@",
    "output": "hydra.run.dir=@",
    "output_dir": "hydra.run.dir=@",
    "paths.data_dir": _DATA,
    "paths.log_dir": "hydra.run.dir=@",
    "paths.output_dir": "hydra.run.dir=@",
    "precision=16": "precision=fp16",
    "precision=16-mixed": "precision=fp16",
    "precision=16-true": "precision=fp16",
    "precision=32": "precision=fp32",
    "precision=32-true": "precision=fp32",
    "precision=64": "precision=fp64",
    "precision=64-true": "precision=fp64",
    "precision=bf16-mixed": "precision=bf16",
    "precision=bf16-true": "precision=bf16",
    "sched": "optim=@",
    "scheduler": "optim=@",
    "seed_everything": "seed=@",
    "smoothing": "optim.label_smoothing=@",
    "task_name": "hydra.run.dir=@",
    "torchcompile": "'callbacks.compiled_branches={}'",
    "train": "revzoo eval ckpt=RUN_DIR, which only evaluates",
    "trainer.callbacks": "callbacks.early_stopping=null, one key for each",
    "trainer.default_root_dir": "hydra.run.dir=@",
    "trainer.enable_checkpointing": "callbacks.best_checkpoint=null callbacks.last_checkpoint=null",
    "trainer.enable_progress_bar": "callbacks.progress_bar=null",
    "trainer.gpus": "trainer.accelerator=gpu trainer.devices=@",
    "trainer.logger": "logger=none",
    "trainer.precision": "precision=@",
    "trainer=default": "trainer=auto",
    "trainer=mps": "trainer.accelerator=mps",
    "warmup_epochs": "optim.schedule.warmup=0.1, a fraction of the run",
    "wd": "optim.weight_decay=@",
    "workers": "data.num_workers=@",
    "world_size": "trainer.devices=@",
}


def our_spelling(key: str, value: str, sections: Container[str]) -> str:
    """``"; use optim.lr=0.1"`` for ``learning_rate=0.1``; empty if the table has no row.

    Args:
        key: as typed.
        value: as typed.
        sections: of the command's configuration; an evaluation has no ``optim``.
    """
    text = SPELLINGS.get(f"{key}={value}", SPELLINGS.get(key))
    if text is None:
        return ""
    text = text.replace("@", value)
    text = SPELLINGS.get(text, text)  # trainer.precision=16: precision=16 is foreign, too
    section = re.split("[.=]", text.lstrip("'+"))[0]
    return f"; use {text}" if section in sections or " " in section else ""
