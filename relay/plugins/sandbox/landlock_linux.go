package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Landlock (landlock(7)) allows access below the files and folders of a ruleset, and denies it
// everywhere else. Each version of its ABI handles more kinds of access: what a kernel does not
// handle is allowed there, and callRules covers what of that could damage a file.

// Rights for the parts of a policy. REFER is to rename and link between folders of the same
// rights.
const (
	readRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	dataRights = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	writeRights = dataRights | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV // Write may name a device, such as a serial port
	// fileRights are the rights that a rule for something other than a folder may have.
	fileRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// Versions of the ABI, by what they added.
const (
	abiRefer, abiTruncate, abiIoctl, abiScopes, abiUnix = 2, 3, 5, 6, 9

	// erratumSignal is fixed where the scope of signals does not separate the threads of a
	// process from each other.
	erratumSignal = 1 << 1
)

// Available returns nil if programs can be restricted on this machine, or an error that says why
// not.
func Available() error {
	if nativeArch == 0 {
		return fmt.Errorf("%w: it does not support this processor architecture", errUnavailable)
	}
	_, err := kernelABI()
	switch {
	case errors.Is(err, syscall.ENOSYS):
		return fmt.Errorf("%w: this kernel has no Landlock (Linux 5.13 or later, built with CONFIG_SECURITY_LANDLOCK)", errUnavailable)
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%w: Landlock is disabled in this kernel; add it to the boot parameter lsm=", errUnavailable)
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%w: Landlock is forbidden to this process, by the filter of system calls of a container or a service", errUnavailable)
	case err != nil:
		return fmt.Errorf("%w: Landlock cannot be used: %w", errUnavailable, err)
	}
	return nil
}

// kernelABI returns the version of Landlock's ABI.
func kernelABI() (int, error) { return createRuleset(nil, unix.LANDLOCK_CREATE_RULESET_VERSION) }

// createRuleset is landlock_create_ruleset(2).
func createRuleset(attr *unix.LandlockRulesetAttr, flags uintptr) (int, error) {
	var size uintptr
	if attr != nil {
		size = unsafe.Offsetof(attr.Scoped) + unsafe.Sizeof(attr.Scoped) // older kernels accept zeros that they do not know
	}
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(attr)), size, flags)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// restrictFiles applies the policy to the calling thread and returns the version of the ABI
// that it used.
func restrictFiles(p *Policy) (abi int, err error) {
	if abi, err = kernelABI(); err != nil {
		return 0, fmt.Errorf("landlock: %w", err)
	}
	abi = min(abi, cmp.Or(p.MaxABI, abi))
	var handled unix.LandlockRulesetAttr
	handled.Handled_access_fs = unix.LANDLOCK_ACCESS_FS_REFER - 1 // all that ABI 1 has
	for _, added := range []struct {
		abi   int
		right uint64
	}{{abiRefer, unix.LANDLOCK_ACCESS_FS_REFER}, {abiTruncate, unix.LANDLOCK_ACCESS_FS_TRUNCATE}, {abiIoctl, unix.LANDLOCK_ACCESS_FS_IOCTL_DEV}, {abiUnix, unix.LANDLOCK_ACCESS_FS_RESOLVE_UNIX}} {
		if abi >= added.abi {
			handled.Handled_access_fs |= added.right
		}
	}
	if abi >= abiScopes {
		handled.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
		if fixed, err := createRuleset(nil, unix.LANDLOCK_CREATE_RULESET_ERRATA); err == nil && fixed&erratumSignal != 0 {
			handled.Scoped |= unix.LANDLOCK_SCOPE_SIGNAL
		}
	}
	ruleset, err := createRuleset(&handled, 0)
	if err != nil {
		return 0, fmt.Errorf("landlock: %w", err)
	}
	defer func() { _ = unix.Close(ruleset) }()
	if err := addRules(ruleset, handled.Handled_access_fs, p); err != nil {
		return 0, err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(ruleset), 0, 0); errno != 0 {
		return 0, fmt.Errorf("landlock: %w", errno)
	}
	return abi, nil
}

// addRules adds a rule for each path of the policy.
func addRules(ruleset int, handled uint64, p *Policy) error {
	private := make([]string, 0, len(p.Private))
	for _, path := range p.Private {
		fd, real, err := openPath(path)
		switch {
		case errors.Is(err, syscall.ENOENT):
			continue
		case errors.Is(err, syscall.EACCES): // below a folder that this user cannot enter
			private = append(private, path)
			continue
		case err != nil:
			return err
		}
		_ = unix.Close(fd)
		private = append(private, real)
	}
	for _, part := range []struct {
		paths    []string
		rights   uint64
		ours     bool // named by the relay: may lie in what is private
		optional bool
	}{
		{paths: []string{p.Folder}, rights: readRights, ours: true},
		{paths: slices.DeleteFunc([]string{p.Data}, func(s string) bool { return s == "" }), rights: dataRights, ours: true},
		{paths: systemPaths, rights: readRights, optional: true},
		{paths: devices, rights: dataRights, optional: true},
		{paths: p.Read, rights: readRights},
		{paths: p.Write, rights: writeRights},
	} {
		for _, path := range part.paths {
			fd, real, err := openPath(path)
			if part.optional && errors.Is(err, syscall.ENOENT) {
				continue
			}
			if err != nil {
				return fmt.Errorf("allow %s: %w", path, err)
			}
			if !part.ours {
				err = checkOverlap(real, private)
			}
			if err == nil {
				err = addRule(ruleset, fd, part.rights&handled)
			}
			_ = unix.Close(fd)
			if err != nil {
				return fmt.Errorf("allow %s: %w", path, err)
			}
		}
	}
	return nil
}

// checkOverlap refuses a path that contains something private, or lies in it.
func checkOverlap(path string, private []string) error {
	below := func(p, q string) bool { return p == q || strings.HasPrefix(p, strings.TrimSuffix(q, "/")+"/") }
	for _, q := range private {
		switch {
		case below(path, q):
			return fmt.Errorf("a plugin must not see it: it lies in %s, which the relay keeps to itself", q)
		case below(q, path):
			return fmt.Errorf("a plugin must not see it: it contains %s, which the relay keeps to itself", q)
		}
	}
	return nil
}

// openPath opens a file or folder without reading it (O_PATH), for which this process needs no right to
// read, and returns its real path. A rule is made of what was opened, so that nobody can exchange the path
// between the check and the rule.
func openPath(path string) (fd int, real string, err error) {
	if fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
		return -1, "", err
	}
	if real, err = os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err != nil {
		_ = unix.Close(fd)
		return -1, "", err
	}
	return fd, real, nil
}

// addRule allows access to what fd refers to, and to everything below it.
func addRule(ruleset, fd int, rights uint64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	// The kernel's struct is packed: 12 bytes, without the padding of Go's.
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights, Parent_fd: int32(fd)}
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return fmt.Errorf("landlock: %w", errno)
	}
	return nil
}
