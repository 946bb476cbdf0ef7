"""FlashInfer's modules compiled ahead of time: a wheel that FlashInfer loads instead of nvcc."""
