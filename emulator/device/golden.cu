// Runs the golden cases on the chip and appends inputs and outputs of those that the file lacks: golden FILE [ONLY_CASE]
// Build where nvcc is: nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Ilowbit/cuda -o golden emulator/device/golden.cu
#include <cuda.h>
#include <cuda_runtime.h>
#include <set>
#include "../golden/prims.h"
#include "../golden/cases.h"

static void check(cudaError_t e, const char* what) {
    if (e != cudaSuccess) { fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e)); exit(1); }
}
static hw::TensorMap make_map(void* base, int mode, int box_bytes) {  // 40 rows x 100 u16, row pitch 104
    void* fn = nullptr;
    cudaDriverEntryPointQueryResult q;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &q), "entry point");
    const CUtensorMapSwizzle sw[4] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_32B};
    cuuint64_t dims[2] = {100, 40}, strides[1] = {208};
    cuuint32_t box[2] = {cuuint32_t(box_bytes / 2), 32}, elem[2] = {1, 1};
    CUtensorMap m;
    CUresult r = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(fn)(
        &m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, dims, strides, box, elem, CU_TENSOR_MAP_INTERLEAVE_NONE, sw[mode],
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) { fprintf(stderr, "tensor map: error %d\n", int(r)); exit(1); }
    hw::TensorMap t;
    memcpy(&t, &m, sizeof t);
    return t;
}

int main(int argc, char** argv) {
    if (argc < 2) { fprintf(stderr, "usage: golden FILE [ONLY_CASE]\n"); return 2; }
    std::set<std::string> have;
    if (FILE* old = fopen(argv[1], "rb")) {
        for (Record r; read_record(old, r);) have.insert(r.name);
        fclose(old);
    }
    FILE* f = fopen(argv[1], "ab");
    int seed = 0, done = 0;
#define X(LABEL, KERNEL, CTAS, THREADS, IN, OUT, ARG, GEN)                                              \
    if (++seed; !have.count(LABEL) && (argc < 3 || !strcmp(argv[2], LABEL))) {                                         \
        std::vector<uint8_t> in = make_input(GEN, IN, ARG, seed)  , out(OUT);                           \
        u8 *din, *dout;                                                                                 \
        check(cudaMalloc(&din, IN), "malloc"); check(cudaMalloc(&dout, OUT), "malloc");                 \
        check(cudaMemcpy(din, in.data(), IN, cudaMemcpyDefault), "copy");                               \
        check(cudaMemset(dout, 0xff, OUT), "set");                                                      \
        Prim prim{{}, din, dout, ARG, 0};                                                               \
        if (GEN >= TMA0) prim.map = make_map(din, GEN - TMA0, ARG);                                          \
        cudaLaunchConfig_t cfg{};                                                                       \
        cfg.gridDim = CTAS; cfg.blockDim = THREADS; cfg.dynamicSmemBytes = 32768;                       \
        cudaLaunchAttribute at[1];                                                                      \
        at[0].id = cudaLaunchAttributeClusterDimension;                                                 \
        at[0].val.clusterDim.x = CTAS; at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;             \
        cfg.attrs = at; cfg.numAttrs = CTAS > 1;                                                        \
        check(cudaLaunchKernelEx(&cfg, KERNEL, prim), LABEL);                                          \
        check(cudaDeviceSynchronize(), LABEL);                                                          \
        check(cudaMemcpy(out.data(), dout, OUT, cudaMemcpyDefault), "copy");                            \
        write_record(f, LABEL, in, out);                                                                \
        cudaFree(din); cudaFree(dout); ++done;                                                                 \
    }
    CASES(X)
#undef X
    fclose(f);
    printf("golden: %d of %d cases recorded now, %d were there\n", done, seed, int(have.size()));
}
