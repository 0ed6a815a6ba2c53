// The source of small.fatbin and small.o, which the tests of hostile input cut short and damage:
//   nvcc -gencode=arch=compute_120f,code=[sm_120f,compute_120f] -gencode=arch=compute_90a,code=sm_90a
// with `-fatbin -Xfatbin=-compress-all --compress-mode=size` for small.fatbin, `-c --compress-mode=none` for small.o.
extern "C" __global__ void empty(int*) {}
__global__ void writes(int* p) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  p[threadIdx.x] = 1;
  asm volatile("griddepcontrol.launch_dependents;");
}
