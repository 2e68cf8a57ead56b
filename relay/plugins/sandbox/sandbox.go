// Package sandbox starts a program that can use the files of a policy and no others, and that
// cannot disturb the process that started it.
//
//	cmd := sandbox.Command(policy, "/path/of/program")
//	cmd.Stdin, cmd.Stdout = in, out
//	err := sandbox.Start(cmd) // the program runs, or err says why not
//
// A Go program cannot restrict a child only, because a child inherits the restrictions of the
// thread that starts it. Therefore Command starts this executable again. This package's
// init recognizes that by the process's name, applies the restrictions to itself and executes
// the program:
//
//	Landlock   files outside of the policy can be neither read, written nor listed; other
//	           processes can be neither traced (ABI 1) nor signaled (ABI 6)
//	seccomp    what Landlock does not cover: Unix sockets, io_uring, modes and owners of files
//	           by path, limits and priorities of other processes, children of others
//	the rest   no_new_privs, no capabilities, limits, no inherited descriptors, umask 077
//
// Whatever cannot be applied is an error, and the program does not run.
package sandbox

import (
	"errors"
	"strings"
)

// Policy says what a program may use. Paths are absolute. The program can also read and run what
// programs in general need (systemPaths).
type Policy struct {
	Folder string `json:"folder"` // the program's own files: read and run
	Data   string `json:"data"`   // a folder to read and write; "" for none
	// Temp is the name of a folder of Data that is emptied when the program starts, for TMPDIR.
	// Programs that share Data at the same time each need another one. "": none.
	Temp string `json:"temp,omitempty"`
	// Read are more files and folders to read and run, Write to read and write. Each must
	// exist.
	Read  []string `json:"read,omitempty"`
	Write []string `json:"write,omitempty"`
	// Private are files and folders that must stay out of reach: apart from Folder and Data,
	// nothing that the policy allows may contain one or lie in one.
	Private []string `json:"private"`
	// NoNetwork refuses every socket. Otherwise those of IP are allowed.
	NoNetwork bool `json:"no_network,omitempty"`
	// MaxTasks replaces the limit of processes and threads (maxTasks), for tests.
	MaxTasks uint64 `json:"max_tasks,omitempty"`
	// MaxABI is the newest version of Landlock to use, for tests; 0: the kernel's.
	MaxABI int `json:"max_abi,omitempty"`
}

// errUnavailable begins the errors of Available.
var errUnavailable = errors.New("no sandbox")

// Limits of a program.
const (
	// maxTasks bounds the processes and threads of all programs together. The kernel counts
	// those of a user, so this is added to what the user had at the first Command: what
	// programs leave behind counts for the next ones. It does not bind root.
	maxTasks = 1024
	// softFiles and hardFiles bound its open files. The first is what select(2) can handle.
	softFiles, hardFiles = 1024, 4096
	// oomScore makes the kernel choose the program before the relay when memory runs out; from
	// 0 to 1000.
	oomScore = 500
)

// systemPaths are what a program can read and run: programs, libraries, and what they look up
// about the machine. /proc shows the memory, environment and descriptors of a process only to who
// may trace it. Of /etc only what is public is listed. Those that do not exist are skipped.
var systemPaths = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store",
	"/proc", "/sys/devices/system", "/sys/fs/cgroup", "/sys/kernel/mm",
	"/etc/alternatives", "/etc/debian_version", "/etc/gai.conf", "/etc/group", "/etc/host.conf", "/etc/hostname", "/etc/hosts",
	"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/locale.alias", "/etc/localtime", "/etc/mime.types",
	"/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/etc/protocols", "/etc/resolv.conf", "/etc/services", "/etc/timezone",
	"/etc/ca-certificates", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/ssl/cert.pem", "/etc/ssl/certs", "/etc/ssl/openssl.cnf",
	"/run/resolvconf", "/run/systemd/resolve",
}

// devices can be read and written.
var devices = []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}

// IsReadable reports whether every program can read a path, whatever its policy.
func IsReadable(path string) bool {
	for _, p := range systemPaths {
		if path == p || strings.HasPrefix(path, p+"/") {
			return true
		}
	}
	return false
}
