"""FlashInfer's modules compiled ahead of time: a wheel that FlashInfer loads in place of nvcc."""
