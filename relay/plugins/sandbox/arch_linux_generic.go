//go:build linux && (arm64 || riscv64)

package sandbox

import "golang.org/x/sys/unix"

// System calls by path that not every architecture has: these have the newer ones only.
var (
	pathModeCalls     []uint32
	pathOwnerCalls    []uint32
	pathTruncateCalls = []uint32{unix.SYS_TRUNCATE}
	openCalls         = map[uint32]uint32{unix.SYS_OPENAT: 2} // with the index of its flags
)
