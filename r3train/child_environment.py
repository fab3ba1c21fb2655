"""The part of a run's environment that servers and harnesses inherit: no secrets, nothing of the rank's own."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# Keys and tokens of trackers, clouds and judges are none of a child's business, and torchrun's variables
# would make it join the trainer's group.
_INHERITED_NAMES = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR TEMP TMP HOSTNAME VIRTUAL_ENV CC CXX CPATH"
    " LIBRARY_PATH MAX_JOBS SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE KUBERNETES_SERVICE_HOST"
    " HOST_IP SYNC_TOKEN_IDS_ACROSS_TP USE_TRITON_W8A8_FP8_KERNEL PROMETHEUS_MULTIPROC_DIR".split()
)
_INHERITED_PREFIXES = tuple(
    "LC_ LD_ XDG_ PYTHON CONDA_ CUDA NVIDIA_ NV NCCL_ GLOO_ TP_ TORCH_ TORCHINDUCTOR_ PYTORCH_ TRITON_ CUTE_DSL_ TRTLLM_ FLA_ FA_ CUBLAS CUDNN SLURM_"
    " SGLANG_ SGL_ FLASHINFER_ FLASH_ATTENTION_ DEEPGEMM DG_ DEEPEP MC_ MOONCAKE_ TVM_ TILELANG_ HF_"
    " HUGGINGFACE_ TRANSFORMERS_ TOKENIZERS_ SAFETENSORS_ OMP_ MKL KMP_ GOMP_ OPENBLAS_ NUMEXPR_ NUMBA_"
    " UCX_ FI_ OFI_ EFA_ IB_ RDMA GDR ROCM HIP HSA_ ROCR_ AITER_ MIOPEN_ AMD CCL_ ONEAPI SYCL_ ZE_"
    " MALLOC_ JEMALLOC R3TRAIN_".split()
)
_SECRETS = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD", "_JWT")
# TORCHELASTIC_USE_AGENT_STORE would make the rendezvous of weight updates wait for an agent
# The others are of a rank's own device; SGLang sets the second itself.
_TRAINERS_OWN = (
    "TORCH_NCCL_ASYNC",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "FLA_TILELANG",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def inherited(environ: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """The variables of an environment that a child process gets; ``more`` names further ones."""
    return {
        name: value
        for name, value in environ.items()
        if name in more
        or (
            (name in _INHERITED_NAMES or name.startswith(_INHERITED_PREFIXES))
            and not name.startswith(_TRAINERS_OWN)
            and not name.endswith(_SECRETS)
        )
    }
