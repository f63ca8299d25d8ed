"""Engines that other Python environments hold, and the process between them and a bench.

The scripts `vllm_peer.py` and `openvino_peer.py` run under another interpreter and import nothing of this project.
"""
