"""Options as Lightning, lightning-hydra-template and timm spell them, and ours."""

from __future__ import annotations

import re
from collections.abc import Container

# what to write -> words of other programs, KEY or KEY=VALUE; @ is the value. Keys whose last part
# is ours, such as lr, need no row: the nearest key is suggested anyway.
_OURS = {
    "callbacks.best_checkpoint.monitor=val/acc": "callbacks=model_checkpoint eval_metric",
    "callbacks.best_checkpoint=null callbacks.last_checkpoint=null": "trainer.enable_checkpointing",
    "'callbacks.compiled_branches={}'": "compile model.compile torchcompile",
    "callbacks.early_stopping.patience=10": "callbacks=early_stopping",
    "callbacks.early_stopping=null, one key for each": "trainer.callbacks",
    "callbacks.ema.decay=0.999": "model_ema use_ema",
    "callbacks.ema.decay=@": "model_ema_decay",
    "callbacks.progress_bar=null": "trainer.enable_progress_bar",
    "data.augment.mixup=0.2, or its crops, flip and cutmix: there are no others": (
        "aa auto_augment color_jitter hflip reprob vflip"
    ),
    "data.image_size=@": "img_size input_size",
    "data.num_workers=@": "workers",
    "data=@": "dataset",
    "data=imagefolder data.root=@": "data.data_dir data_dir data_path paths.data_dir",
    "debug=smoke": "debug=default debug=fdr debug=limit fast_dev_run",
    "hydra.run.dir=@": (
        "output output_dir paths.log_dir paths.output_dir task_name trainer.default_root_dir"
    ),
    "logger=none": "trainer.logger",
    "logger=wandb logger.project=@": "logger.wandb.project",
    "model.checkpoint_path=@ for its weights; train --resume RUN_DIR continues a run": (
        "checkpoint ckpt ckpt_path initial_checkpoint resume_from_checkpoint"
    ),
    "model.drop_path_rate=@": "drop_path",
    "model.drop_rate=@": "drop",
    "model=@": "arch",
    "optim.label_smoothing=@": "smoothing",
    "optim.lr=@": "learning_rate",
    "optim.schedule.end=0.01, a fraction of the rate": "min_lr",
    "optim.schedule.name=@": "optim.scheduler.name",
    "optim.schedule.warmup=0.1, a fraction of the run": "warmup_epochs warmup_steps",
    "optim.weight_decay=@": "wd",
    "optim=@": "lr_scheduler opt optimizer sched scheduler",
    "optim=adamw": "optim=adam optim=lamb",
    "optim=onecycle, cosine or step: SGD with this schedule": "optim=momentum optim=sgd",
    "precision=@": "trainer.precision",
    "precision=bf16": "amp fp16 precision=bf16-mixed precision=bf16-true use_amp",
    "precision=fp16": "precision=16 precision=16-mixed precision=16-true",
    "precision=fp32": "precision=32 precision=32-true",
    "precision=fp64": "precision=64 precision=64-true",
    "revzoo eval ckpt=RUN_DIR, which only evaluates": "train",
    "revzoo sweep, which searches ranges such as 'optim.lr=interval(0.01,1)'": "hparams_search",
    "seed=@": "seed_everything",
    "trainer.accelerator=@": "device",
    "trainer.accelerator=gpu": "cuda gpu",
    "trainer.accelerator=gpu trainer.devices=@": "gpus trainer.gpus",
    "trainer.accelerator=mps": "trainer=mps",
    "trainer.accumulate_grad_batches=@": "accumulate_grad grad_accum_steps",
    "trainer.devices=@": "world_size",
    "trainer.gradient_clip_val=@": "clip_grad grad_clip max_grad_norm",
    "trainer.log_every_n_steps=@": "log_interval",
    "trainer.profiler=simple": "debug=profiler",
    "trainer=auto": "trainer=default",
}
SPELLINGS = {theirs: ours for ours, words in _OURS.items() for theirs in words.split()}


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
