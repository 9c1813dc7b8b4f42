// What the owner of an arena in GPU memory does to its slots: bring bytes in, take bytes out,
// publish page headers.
//
// Why kernels and not copies of the runtime: a list of thousands of pieces is one launch, and only
// a kernel can say in which order readers see what it stores. GPU only. Thread safety: compatible.
// Ownership: views only. Every pointer, and every pointer behind one, is to memory that the GPU can
// read, pinned host memory included; pieces are 16-byte aligned.
//
// Guarantee G1, for readers on this GPU and on another one over NVLink alike. A reader loads a unit
// with relaxed loads at system scope, then fences, then loads the generation (kernels/guard.cuh).
// All of them are served by the L2 of the GPU that owns the memory, which is the one place where
// its bytes are; system scope keeps them from being served by the reader's L1.
//  1. The owner publishes the odd generation and waits for the stream, and only then enqueues a
//     write to the slot. So the odd generation is performed at that L2 before any byte of the new
//     content is: kernel end, host, kernel start is a causality order that no reader can see
//     reversed. A reader that loaded one new byte therefore loads, after its fence, the odd
//     generation or a later one, and rejects the copy.
//  2. The owner waits for every write to the slot before it publishes the even generation, which is
//     stored with release at system scope after key and checksum. A reader is told that generation
//     (by a message of the host) only after that launch has ended too, so its loads find the new
//     bytes.

#ifndef LOCKS_KVD_KERNELS_ARENA_IO_H_
#define LOCKS_KVD_KERNELS_ARENA_IO_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/layout.h"

namespace kvd {

struct PieceCopy {
  const uint8_t* from;
  uint8_t* to;
};

// Copies `bytes` of each piece, reading as a guarded reader does: what it reads may be rewritten
// meanwhile, and is then to be judged by LaunchCheckGenerations behind it.
// Stream:   enqueues on `stream` only; allocates nothing; no host sync; capturable. Tables are read
//           when it runs.
// Errors:   cudaErrorInvalidValue unless bytes is a multiple of 16 and the list fits a launch; else
//           the launch's.
[[nodiscard]] cudaError_t LaunchCopyPieces(const PieceCopy* copies, int64_t num_copies,
                                           size_t bytes, cudaStream_t stream);

struct GenerationCheck {
  const PageHeader* header;
  uint64_t generation;  // expected
};

// valid[i] = 1 if the generation is the expected one, and even, after everything before it on
// `stream` was read. Stream and errors as above.
[[nodiscard]] cudaError_t LaunchCheckGenerations(const GenerationCheck* checks, int64_t num_checks,
                                                 uint8_t* valid, cudaStream_t stream);

struct HeaderUpdate {
  PageHeader* header;
  uint64_t generation;
  uint64_t key[2];  // even generations only, like the checksum: an odd one leaves both as they are
  uint64_t summary_checksum;
};

// Stores each header, its generation last. Once `stream` was waited for, no reader sees the slot as
// it was before. Stream and errors as above.
[[nodiscard]] cudaError_t LaunchPublishHeaders(const HeaderUpdate* updates, int64_t num_updates,
                                               cudaStream_t stream);

}  // namespace kvd

#endif  // LOCKS_KVD_KERNELS_ARENA_IO_H_
