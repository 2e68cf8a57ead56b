//go:build linux && !amd64 && !arm && !arm64 && !riscv64

package sandbox

// nativeArch 0 makes Available refuse: on 386 for example the filter cannot tell the sockets of
// socketcall(2) apart.
const nativeArch uint32 = 0

// System calls by path that not every architecture has.
var (
	pathModeCalls, pathOwnerCalls, pathTruncateCalls []uint32
	openCalls                                        map[uint32]uint32
)
