package sandbox

import "golang.org/x/sys/unix"

const nativeArch uint32 = unix.AUDIT_ARCH_X86_64

// System calls by path that not every architecture has.
var (
	pathModeCalls     = []uint32{unix.SYS_CHMOD}
	pathOwnerCalls    = []uint32{unix.SYS_CHOWN, unix.SYS_LCHOWN}
	pathTruncateCalls = []uint32{unix.SYS_TRUNCATE}
	openCalls         = map[uint32]uint32{unix.SYS_OPEN: 1, unix.SYS_OPENAT: 2} // with the index of their flags
)
