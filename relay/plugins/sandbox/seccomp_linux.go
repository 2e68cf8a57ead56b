package sandbox

import (
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The filter of system calls (seccomp(2)) covers what Landlock does not see. It is no list of
// what is allowed: a program of any kind has to work, and Landlock does the rest.

// callRule lets a system call fail with errno, which 0 turns into success without effect, unless the
// argument, masked, is one of allowed. Without allowed it always fails. Arguments are
// compared by their lower 32 bits: all those of the rules are of the type int.
type callRule struct {
	number  uint32
	errno   syscall.Errno
	arg     uint32
	mask    uint32
	allowed []uint32
}

// noEffect is the errno of a rule that pretends success.
const noEffect syscall.Errno = 0

// callRules returns the rules for a version of Landlock's ABI.
func callRules(abi int, noNetwork bool) []callRule {
	var rules []callRule
	deny := func(errno syscall.Errno, numbers ...uint32) {
		for _, n := range numbers {
			rules = append(rules, callRule{number: n, errno: errno})
		}
	}
	only := func(number uint32, errno syscall.Errno, arg uint32, allowed ...uint32) {
		rules = append(rules, callRule{number, errno, arg, ^uint32(0), allowed})
	}
	// Programs of the same user serve Unix sockets, such as the control socket of a board, and
	// trust that user. Landlock separates those of the file system from ABI 9 on only.
	// socketpair(2) is another call and stays.
	if families := []uint32{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}; noNetwork {
		deny(syscall.EACCES, unix.SYS_SOCKET)
	} else {
		only(unix.SYS_SOCKET, syscall.EACCES, 0, families...)
	}
	// io_uring opens sockets past this filter.
	deny(syscall.ENOSYS, unix.SYS_IO_URING_SETUP)
	// Modes, owners and attributes of the relay's files belong to the same user. Programs set the
	// mode of their files, where it makes no difference (umask 077): for them it
	// succeeds. fchmod and the like need an open file and stay.
	deny(noEffect, append(slices.Clone(pathModeCalls), unix.SYS_FCHMODAT)...)
	deny(syscall.ENOSYS, unix.SYS_FCHMODAT2, unix.SYS_SETXATTRAT, unix.SYS_REMOVEXATTRAT, unix.SYS_FILE_SETATTR)
	deny(syscall.EPERM, append(slices.Clone(pathOwnerCalls), unix.SYS_FCHOWNAT)...)
	deny(syscall.ENOTSUP, unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR)
	// Limits and priorities of others; 0 is the caller.
	for _, n := range []uint32{unix.SYS_PRLIMIT64, unix.SYS_SCHED_SETAFFINITY, unix.SYS_SCHED_SETSCHEDULER, unix.SYS_SCHED_SETPARAM, unix.SYS_SCHED_SETATTR} {
		only(n, syscall.EPERM, 0, 0)
	}
	const ioprioWhoProcess = 1 // linux/ioprio.h
	for number, which := range map[uint32]uint32{unix.SYS_SETPRIORITY: unix.PRIO_PROCESS, unix.SYS_IOPRIO_SET: ioprioWhoProcess} {
		only(number, syscall.EPERM, 0, which)
		only(number, syscall.EPERM, 1, 0)
	}
	// A child of the relay that the relay does not know would stay as a zombie. clone3 has its
	// flags in memory, which a filter cannot read; programs fall back to clone.
	rules = append(rules, callRule{unix.SYS_CLONE, syscall.EPERM, 0, unix.CLONE_PARENT, []uint32{0}})
	deny(syscall.ENOSYS, unix.SYS_CLONE3)
	// Before Landlock covers truncation: by path, and by an open whose access mode is neither reading
	// nor writing (3). openat2 is like clone3.
	if abi < abiTruncate {
		deny(syscall.EACCES, pathTruncateCalls...)
		deny(syscall.ENOSYS, unix.SYS_OPENAT2)
		for number, arg := range openCalls {
			rules = append(rules, callRule{number, syscall.EACCES, arg, unix.O_ACCMODE, []uint32{unix.O_RDONLY, unix.O_WRONLY, unix.O_RDWR}})
		}
	}
	return rules
}

// Offsets of struct seccomp_data. Little endian: the lower half of an argument comes first.
const (
	offsetNumber, offsetArch, offsetArgs = 0, 4, 16

	// x32Bit marks the system calls of another ABI of x86-64.
	x32Bit = 1 << 30
)

// assemble makes the program of a filter. Programs of another architecture, whose numbers
// differ, are killed.
func assemble(rules []callRule) []unix.SockFilter {
	const (
		load   = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		and    = unix.BPF_ALU | unix.BPF_AND | unix.BPF_K
		equal  = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		isSet  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		result = unix.BPF_RET | unix.BPF_K
	)
	out := []unix.SockFilter{
		{Code: load, K: offsetArch},
		{Code: equal, K: nativeArch, Jt: 1},
		{Code: result, K: unix.SECCOMP_RET_KILL_PROCESS},
		{Code: load, K: offsetNumber},
		{Code: isSet, K: x32Bit, Jf: 1},
		{Code: result, K: unix.SECCOMP_RET_KILL_PROCESS},
	}
	for _, r := range rules {
		var body []unix.SockFilter
		if len(r.allowed) > 0 {
			body = append(body, unix.SockFilter{Code: load, K: offsetArgs + 8*r.arg}, unix.SockFilter{Code: and, K: r.mask})
			for i, value := range r.allowed {
				// Over the other values and the result, to the load of the number.
				body = append(body, unix.SockFilter{Code: equal, K: value, Jt: uint8(len(r.allowed) - i)})
			}
		}
		body = append(body, unix.SockFilter{Code: result, K: unix.SECCOMP_RET_ERRNO | uint32(r.errno)})
		if len(r.allowed) > 0 {
			body = append(body, unix.SockFilter{Code: load, K: offsetNumber}) // for the next rule
		}
		out = append(out, unix.SockFilter{Code: equal, K: r.number, Jf: uint8(len(body))})
		out = append(out, body...)
	}
	return append(out, unix.SockFilter{Code: result, K: unix.SECCOMP_RET_ALLOW})
}

// filterCalls applies the rules to the calling thread. It uses prctl(2), which a service
// manager's own filter allows.
func filterCalls(rules []callRule) error {
	program := assemble(rules)
	prog := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}
