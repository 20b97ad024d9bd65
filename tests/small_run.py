"""Overrides for runs of seconds on the digits."""

SMALL = ("debug=smoke", "trainer=cpu", "+model.units=[1,1,1]", "memory=exact")
# pictures, and the step that the footprint counts, take longer than a short training
NO_EXTRAS = ("logger=none", "callbacks.footprint=null")
QUICK = (*SMALL, *NO_EXTRAS)
# of the whole revnet38, whose memory is planned
ONE_STEP = (
    *("debug=smoke", "trainer=cpu", "test=false", "logger=none", "callbacks=none"),
    *("trainer.limit_train_batches=1", "trainer.limit_val_batches=0", "data.batch_size=64"),
)
