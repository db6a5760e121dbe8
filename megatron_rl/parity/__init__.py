"""Our model against transformers: log-probs, losses, gradients and parameters after SGD, on any layout.

documents.py makes the token ids both sides read, oracle.py is transformers' side, ranks.py ours, exchange.py the files through which their
tensors meet, report.py the comparison. `launch.parity` starts the processes.
"""
