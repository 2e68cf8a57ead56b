package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// The launcher runs in init, before the packages of the relay are initialized, so that it is
// ready in a few milliseconds and no other code runs in it.
func init() {
	if len(os.Args) >= 3 && os.Args[0] == launcherName {
		err := launch(os.Args[1], os.Args[2:])
		_, _ = syscall.Write(reportFD, []byte(err.Error()))
		os.Exit(126) // a shell's status for a program that cannot be executed
	}
}

// launch restricts this process and executes the program argv[0]. It returns only with an error. Some
// restrictions are those of a thread, and an exec keeps the ones of the thread that calls it.
func launch(policy string, argv []string) error {
	runtime.LockOSThread()
	var p Policy
	if err := json.Unmarshal([]byte(policy), &p); err != nil {
		return err
	}
	if err := unix.CloseRange(reportFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close inherited descriptors: %w", err)
	}
	syscall.Umask(0o077)
	// Best effort: it fails only if the score is higher already.
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(oomScore)), 0)
	if err := setLimits(p.MaxTasks); err != nil {
		return fmt.Errorf("set limits: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	abi, err := restrictFiles(&p)
	if err != nil {
		return err
	}
	if err := checkUnreachable(p.Private); err != nil {
		return err
	}
	if p.Data != "" && p.Temp != "" { // under the restrictions, since the program decides what is in there
		tmp := filepath.Join(p.Data, p.Temp)
		if err := errors.Join(os.RemoveAll(tmp), os.Mkdir(tmp, 0o700)); err != nil {
			return fmt.Errorf("empty the folder for temporary files: %w", err)
		}
	}
	if err := filterCalls(callRules(abi, p.NoNetwork)); err != nil {
		return fmt.Errorf("filter system calls (seccomp): %w", err)
	}
	err = syscall.Exec(argv[0], argv, os.Environ())
	if errors.Is(err, syscall.EACCES) {
		return fmt.Errorf("%w: the program or its interpreter is not executable, or lies outside of what the sandbox allows to read", err)
	}
	return err
}

// setLimits bounds what the program can take from the machine.
func setLimits(tasks uint64) error {
	limits := map[int]syscall.Rlimit{
		unix.RLIMIT_CORE:   {},
		unix.RLIMIT_NOFILE: {Cur: softFiles, Max: hardFiles},
		unix.RLIMIT_NPROC:  {Cur: tasks, Max: tasks},
	}
	for resource, l := range limits {
		var now syscall.Rlimit
		if err := syscall.Getrlimit(resource, &now); err != nil {
			return err
		}
		l.Max = min(l.Max, now.Max)
		l.Cur = min(l.Cur, l.Max)
		if err := syscall.Setrlimit(resource, &l); err != nil {
			return err
		}
	}
	return nil
}

// dropCapabilities gives up the capabilities of root. With no_new_privs no program that is
// executed later gets them back.
func dropCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var now, none [2]unix.CapUserData
	if err := unix.Capget(&header, &now[0]); err != nil {
		return err
	}
	if now == none { // a service manager's filter may forbid capset
		return nil
	}
	return unix.Capset(&header, &none[0]) // clears the ambient set, too
}

// checkUnreachable tries to open what must be out of reach. It finds what the comparison of
// paths in addRules cannot, such as a bind mount.
func checkUnreachable(private []string) error {
	for _, path := range private {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
			return fmt.Errorf("%s is still readable under the restrictions; is it mounted below a path that plugins can read?", path)
		}
	}
	return nil
}
