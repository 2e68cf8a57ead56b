package sandbox

import "golang.org/x/sys/unix"

const nativeArch uint32 = unix.AUDIT_ARCH_AARCH64
