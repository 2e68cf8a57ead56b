package sandbox

import "golang.org/x/sys/unix"

const nativeArch uint32 = unix.AUDIT_ARCH_ARM

// System calls by path that not every architecture has.
var (
	pathModeCalls     = []uint32{unix.SYS_CHMOD}
	pathOwnerCalls    = []uint32{unix.SYS_CHOWN, unix.SYS_LCHOWN, unix.SYS_CHOWN32, unix.SYS_LCHOWN32}
	pathTruncateCalls = []uint32{unix.SYS_TRUNCATE, unix.SYS_TRUNCATE64}
	openCalls         = map[uint32]uint32{unix.SYS_OPEN: 1, unix.SYS_OPENAT: 2} // with the index of their flags
)
