"""Trackers of experiments, such as Weights & Biases, MLflow, Trackio and SwanLab.

Each runs in a separate process, `sluice.trackers.process`, which follows the files of the run
directory and passes on what is new. It keeps its position in a file: a tracker that died or could
not reach its server goes on where it was, and a finished run can be sent later (`sluice track`).

The process may run in another environment than the trainer's, because libraries of trackers want
other releases than ours. So the modules that it imports, all but `settings`, import nothing but the
standard library, `sluice.telemetry.run_directory` and `sluice.runtime.user_code`.
"""
