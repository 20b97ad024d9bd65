"""Exact resumes and safe kills: a resumed run equals one that was never stopped, bit for bit.

Lightning 2.6 restores weights, optimiser, schedule, callbacks and counters. It lacks:

================  ==================================================================================
``run_state``     the random states, the metrics of an open epoch
``csv_logger``    its ``CSVLogger`` deletes the earlier rows when a run resumes
``graceful_stop`` after SIGTERM it ends a run without saving; SIGHUP and SIGUSR1 kill the run;
                  ``ModelCheckpoint(save_on_exception=True)`` saves anywhere, also inside an
                  optimiser step, where Lightning cannot resume exactly
================  ==================================================================================

docs/decisions/008-runs-that-can-be-stopped.md gives the reasons. All uses of Lightning's private
parts are in :mod:`revzoo.training.lightning_compat`.
"""
