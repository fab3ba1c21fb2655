"""Both twins for machines without CUDA: of the parts of Megatron-Core and of SGLang that want a GPU."""
