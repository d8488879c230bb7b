// Every kernel, in one module.
#include "attention.cu"
#include "cache_evict.cu"
#include "infinipot.cu"
#include "newer_similarity.cu"
#include "norms.cu"
#include "pool_norms.cu"
#include "rotary.cu"
#include "temporal_similarity.cu"
