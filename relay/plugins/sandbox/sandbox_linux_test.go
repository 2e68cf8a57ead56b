package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The tests run this binary in the sandbox, where it tries everything that a hostile plugin of the
// relay could, and reports what succeeded. The relay is the process of the test.

// hostileEnv has the description of the world for a run of this binary as a plugin.
const hostileEnv = "TEST_HOSTILE_PLUGIN"

// world is what a hostile plugin knows about the relay.
type world struct {
	Folder, Data, State string
	Relay               int    // its process id
	TCP                 string // an address where it listens
	Abstract            string // the name of an abstract Unix socket
	HeldFD              int    // a descriptor of the relay that refers to a key
	Tasks               bool   // try to start processes without end
}

func TestMain(m *testing.M) {
	if path := os.Getenv(oldKernelEnv); path != "" {
		runOnOldKernel(path)
		endChild()
	}
	if text := os.Getenv(hostileEnv); text != "" {
		var w world
		if err := json.Unmarshal([]byte(text), &w); err != nil {
			panic(err)
		}
		report := map[string]string{}
		for _, set := range []map[string]func() error{w.attacks(), w.needs()} {
			for name, try := range set {
				if err := try(); err != nil {
					report[name] = err.Error()
				} else {
					report[name] = ""
				}
			}
		}
		_ = json.NewEncoder(os.Stdout).Encode(report)
		endChild()
	}
	os.Exit(m.Run())
}

// endChild ends this process. os.Exit would wait for the race detector's atexit_sleep_ms: a second,
// since the environment of a sandboxed program has no GORACE.
func endChild() { syscall.Exit(0) }

// attacks are what must fail: each returns nil if it succeeded.
func (w *world) attacks() map[string]func() error {
	key, db := filepath.Join(w.State, "keys", "1.key"), filepath.Join(w.State, "relay.db")
	relay := "/proc/" + strconv.Itoa(w.Relay)
	planted := filepath.Join(w.Data, "planted")
	read := func(path string) func() error {
		return func() error {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			if _, err = f.Read(make([]byte, 1)); err == io.EOF {
				return nil
			}
			return err
		}
	}
	list := func(path string) func() error { return func() error { _, err := os.ReadDir(path); return err } }
	write := func(path string) func() error { return func() error { return os.WriteFile(path, []byte("x"), 0o600) } }
	errno := func(n syscall.Errno) error {
		if n == 0 {
			return nil
		}
		return n
	}
	modeOf := func(path string) os.FileMode {
		st, err := os.Stat(path)
		if err != nil {
			return 0
		}
		return st.Mode()
	}
	return map[string]func() error{
		"read a key":                          read(key),
		"read the database":                   read(db),
		"read a key by ..":                    read("../../keys/1.key"),
		"read a key by a symbolic link":       func() error { _ = os.Symlink(key, planted+".sym"); return read(planted + ".sym")() },
		"read a key by a hard link":           func() error { return os.Link(key, planted+".hard") },
		"move a key":                          func() error { return os.Rename(key, planted+".moved") },
		"list the state directory":            list(w.State),
		"list the keys":                       list(filepath.Join(w.State, "keys")),
		"read a key below /proc/1/root":       read("/proc/1/root" + key),
		"read a key below the relay's root":   read(relay + "/root" + key),
		"read a key below the relay's folder": read(relay + "/cwd/" + filepath.Base(key)),
		"see what the relay's descriptor is":  func() error { _, err := os.Readlink(relay + "/fd/" + strconv.Itoa(w.HeldFD)); return err },
		"open the relay's descriptor":         read(relay + "/fd/" + strconv.Itoa(w.HeldFD)),
		"use an inherited descriptor":         func() error { _, err := unix.FcntlInt(uintptr(w.HeldFD), unix.F_GETFD, 0); return err },
		"read the relay's environment":        read(relay + "/environ"),
		"read the relay's memory map":         read(relay + "/maps"),
		"open the relay's memory":             func() error { f, err := os.OpenFile(relay+"/mem", os.O_RDWR, 0); _ = f.Close(); return err },
		"trace the relay":                     func() error { return syscall.PtraceAttach(w.Relay) },
		"read the relay's memory": func() error {
			_, err := unix.ProcessVMReadv(w.Relay, []unix.Iovec{{Base: new(byte), Len: 1}}, []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(w)), Len: 1}}, 0)
			return err
		},
		"take the relay's descriptor": func() error {
			fd, err := unix.PidfdOpen(w.Relay, 0)
			if err == nil {
				_, err = unix.PidfdGetfd(fd, w.HeldFD, 0)
			}
			return err
		},
		"signal the relay": func() error { return syscall.Kill(w.Relay, syscall.SIGCONT) },
		"set the relay's limits": func() error {
			return unix.Prlimit(w.Relay, unix.RLIMIT_CPU, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil)
		},
		"set the relay's priority":            func() error { return syscall.Setpriority(syscall.PRIO_PROCESS, w.Relay, 0) },
		"set the priority of all of the user": func() error { return syscall.Setpriority(syscall.PRIO_USER, 0, 0) },
		"set the relay's processors":          func() error { var s unix.CPUSet; s.Set(0); return unix.SchedSetaffinity(w.Relay, &s) },
		"set the mode of a key": func() error {
			before := modeOf(key)
			if err := os.Chmod(key, 0o644); err != nil {
				return err
			}
			if modeOf(key) == before {
				return errors.New("without effect")
			}
			return nil
		},
		"set the mode by a descriptor's path": func() error {
			fd, err := unix.Open(key, unix.O_PATH, 0)
			if err != nil {
				return err
			}
			before := modeOf(key)
			if err := os.Chmod("/proc/self/fd/"+strconv.Itoa(fd), 0o644); err != nil {
				return err
			}
			if modeOf(key) == before {
				return errors.New("without effect")
			}
			return nil
		},
		"set the mode by fchmodat2": func() error {
			fd, err := unix.Open(key, unix.O_PATH, 0)
			if err != nil {
				return err
			}
			_, _, n := unix.Syscall6(unix.SYS_FCHMODAT2, uintptr(fd), uintptr(unsafe.Pointer(&[]byte{0}[0])), 0o644, unix.AT_EMPTY_PATH, 0, 0)
			return errno(n)
		},
		"set the owner of a key":           func() error { return os.Chown(key, os.Getuid(), os.Getgid()) },
		"set an attribute of a key":        func() error { return unix.Setxattr(key, "user.x", []byte("x"), 0) },
		"truncate the database":            func() error { return syscall.Truncate(db, 1) },
		"truncate the database by an open": func() error { fd, err := unix.Open(db, unix.O_ACCMODE|unix.O_TRUNC, 0); _ = unix.Close(fd); return err },
		"truncate the database by openat2": func() error {
			fd, err := unix.Openat2(unix.AT_FDCWD, db, &unix.OpenHow{Flags: unix.O_ACCMODE | unix.O_TRUNC})
			_ = unix.Close(fd)
			return err
		},
		"write the database":                   write(db),
		"remove the database":                  func() error { return os.Remove(db) },
		"make a file in the state directory":   write(filepath.Join(w.State, "new")),
		"make a folder in the state directory": func() error { return os.Mkdir(filepath.Join(w.State, "newdir"), 0o700) },
		"make a pipe in the state directory":   func() error { return unix.Mkfifo(filepath.Join(w.State, "fifo"), 0o600) },
		"make a link in the state directory":   func() error { return os.Symlink("/", filepath.Join(w.State, "link")) },
		"make a device":                        func() error { return unix.Mknod(filepath.Join(w.Data, "mem"), unix.S_IFCHR|0o600, 1<<8|1) },
		"replace its own program":              write(filepath.Join(w.Folder, "run")),
		"move its own program":                 func() error { return os.Rename(filepath.Join(w.Folder, "run"), planted) },
		"write its own manifest":               write(filepath.Join(w.Folder, "plugin.json")),
		"write another plugin's manifest":      write(filepath.Join(w.State, "plugins", "other", "plugin.json")),
		"read another plugin's data":           read(filepath.Join(w.State, "plugin-data", "other", "secret")),
		"move its own data":                    func() error { return os.Rename(w.Data, w.Data+"2") },
		"run what it wrote": func() error {
			if err := os.WriteFile(planted+".sh", []byte("#!/bin/sh\n"), 0o700); err != nil {
				return err
			}
			return exec.Command(planted + ".sh").Run()
		},
		"connect to the relay's socket": func() error { _, err := net.Dial("unix", filepath.Join(w.State, "control.sock")); return err },
		"connect to an abstract socket": func() error { _, err := net.Dial("unix", w.Abstract); return err },
		"make an io_uring": func() error {
			_, _, n := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(new([120]byte))), 0)
			return errno(n)
		},
		"make a raw socket": func() error { _, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0); return err },
		"mount":             func() error { return unix.Mount("none", w.Data, "tmpfs", 0, "") },
		"mount in a namespace": func() error {
			cmd := exec.Command("/bin/sh", "-c", "mount --bind "+w.State+" "+w.Data+" && cat keys/1.key")
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS}
			return cmd.Run()
		},
		"become another user":           func() error { return syscall.Setuid(12345) },
		"read the machine's memory":     read("/dev/mem"),
		"read the kernel's memory":      read("/proc/kcore"),
		"read the password hashes":      read("/etc/shadow"),
		"read a home directory":         list("/root"),
		"write a setting of the kernel": write("/proc/sys/kernel/core_pattern"),
		"write below /usr":              write("/usr/planted"),
		"make a core file": func() error {
			var l syscall.Rlimit
			if err := syscall.Getrlimit(syscall.RLIMIT_CORE, &l); err != nil {
				return err
			}
			if l.Max == 0 {
				return errors.New("no core files")
			}
			return nil
		},
		"make a child of the relay": func() error {
			pid, _, n := syscall.RawSyscall6(unix.SYS_CLONE, unix.CLONE_PARENT|uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
			if n == 0 && pid == 0 {
				for {
					_, _, _ = syscall.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
				}
			}
			return errno(n)
		},
		"start processes without end": func() error {
			if !w.Tasks {
				return errors.New("not tried: the limit does not bind root")
			}
			for range 2 * testTasks {
				cmd := exec.Command("/bin/sleep", "60")
				if err := cmd.Start(); err != nil {
					return err
				}
				defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
			}
			return nil
		},
	}
}

// needs are what a usual plugin does, and so must succeed. Their names begin with "+".
func (w *world) needs() map[string]func() error {
	return map[string]func() error{
		"+read its folder":  func() error { _, err := os.ReadFile("plugin.json"); return err },
		"+read /etc/passwd": func() error { _, err := os.ReadFile("/etc/passwd"); return err },
		"+read /proc":       func() error { _, err := os.ReadFile("/proc/self/status"); return err },
		"+read /dev/urandom": func() error {
			f, err := os.Open("/dev/urandom")
			if err == nil {
				_, err = f.Read(make([]byte, 8))
			}
			return err
		},
		"+write /dev/null": func() error { return os.WriteFile("/dev/null", []byte("x"), 0) },
		"+run a program":   func() error { return exec.Command("/bin/sh", "-c", "ls /usr | cat >/dev/null").Run() },
		"+stop a child": func() error {
			cmd := exec.Command("/bin/sleep", "60")
			if err := cmd.Start(); err != nil {
				return err
			}
			defer func() { _ = cmd.Wait() }()
			return cmd.Process.Kill()
		},
		"+write data":          func() error { return os.WriteFile(filepath.Join(w.Data, "f"), []byte("x"), 0o600) },
		"+find data of before": func() error { _, err := os.ReadFile(filepath.Join(w.Data, "before")); return err },
		"+set the mode of its file": func() error {
			f, err := os.Create(filepath.Join(w.Data, "g"))
			if err == nil {
				err = errors.Join(f.Chmod(0o640), os.Chmod(f.Name(), 0o600), f.Truncate(3), f.Close())
			}
			return err
		},
		"+replace a file": func() error {
			_ = os.WriteFile(filepath.Join(w.Data, "a"), nil, 0o600)
			return os.Rename(filepath.Join(w.Data, "a"), filepath.Join(w.Data, "b"))
		},
		"+write temporary files": func() error {
			f, err := os.CreateTemp("", "")
			if err == nil {
				err = f.Close()
			}
			return err
		},
		"+connect by TCP": func() error {
			c, err := net.Dial("tcp", w.TCP)
			if err == nil {
				err = c.Close()
			}
			return err
		},
		"+send by UDP": func() error {
			c, err := net.Dial("udp", w.TCP)
			if err == nil {
				_, err = c.Write([]byte("x"))
			}
			return err
		},
		"+list its addresses":     func() error { _, err := net.InterfaceAddrs(); return err },
		"+make a pair of sockets": func() error { _, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0); return err },
		"+set its own limits": func() error {
			var l syscall.Rlimit
			if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
				return err
			}
			l.Cur--
			return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l)
		},
		"+set its own priority": func() error { return syscall.Setpriority(syscall.PRIO_PROCESS, 0, 19) },
		"+no capability, no way to get one": func() error {
			b, err := os.ReadFile("/proc/self/status")
			for _, line := range []string{"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
				if !strings.Contains(string(b), line) {
					return fmt.Errorf("no line %s: %w", line, err)
				}
			}
			return err
		},
	}
}

// build lays out a state directory and returns a world and the policy of its plugin "odd".
func build(t *testing.T) (*world, Policy) {
	t.Helper()
	state := t.TempDir()
	w := &world{State: state, Folder: filepath.Join(state, "plugins", "odd"), Data: filepath.Join(state, "plugin-data", "odd"), Relay: os.Getpid()}
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string][]byte{
		"keys/1.key": []byte("key"), "relay.db": []byte("database"), "plugins/other/plugin.json": nil, "plugin-data/other/secret": nil,
		"plugins/odd/plugin.json": nil, "plugins/odd/run": exe, "plugin-data/odd/before": nil, "plugin-data/odd/tmp/deep/er/old": nil,
	} {
		path = filepath.Join(state, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o700)); err != nil {
			t.Fatal(err)
		}
	}
	listen := func(network, address string) net.Listener {
		ln, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ln.Close() })
		return ln
	}
	w.TCP = listen("tcp", "127.0.0.1:0").Addr().String()
	w.Abstract = fmt.Sprintf("@agentctl-test-%d", os.Getpid())
	listen("unix", w.Abstract)
	t.Chdir(filepath.Join(state, "keys"))
	listen("unix", filepath.Join("..", "control.sock")) // a short path
	// A descriptor of a key that an exec does not close.
	w.HeldFD, err = unix.Open("1.key", unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(w.HeldFD) })
	return w, Policy{Folder: w.Folder, Data: w.Data, Temp: "tmp", Private: []string{state}, MaxTasks: testTasks}
}

// testTasks is above the threads of a Go program with its children.
const testTasks = 100

// run runs the plugin and returns its report: the error of each try, "" for success.
func run(t *testing.T, w *world, p Policy) map[string]string {
	t.Helper()
	text, err := json.Marshal(w)
	if err != nil {
		t.Fatal(err)
	}
	cmd := Command(p, filepath.Join(w.Folder, "run"))
	cmd.Dir = w.Folder
	cmd.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=" + filepath.Join(w.Data, "tmp"), hostileEnv + "=" + string(text)}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := Start(cmd); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	report := map[string]string{}
	if err := json.Unmarshal([]byte(out.String()), &report); err != nil {
		t.Fatalf("%v: %q", err, out.String())
	}
	return report
}

// oldKernelEnv has the path of a program, for a run of this binary without Landlock.
const oldKernelEnv = "TEST_OLD_KERNEL"

// runOnOldKernel prints what Available and Start say where landlock_create_ruleset does not exist.
func runOnOldKernel(path string) {
	runtime.LockOSThread()
	err := errors.Join(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
		filterCalls([]callRule{{number: unix.SYS_LANDLOCK_CREATE_RULESET, errno: syscall.ENOSYS}}))
	if err == nil {
		cmd := Command(Policy{Folder: filepath.Dir(path)}, path)
		cmd.Stdout = os.Stdout
		err = errors.Join(Available(), Start(cmd)) // in this thread: its children inherit the filter
	}
	fmt.Println(err)
}

// TestOldKernel: without Landlock the program does not run, even if nobody asks Available.
func TestOldKernel(t *testing.T) {
	sandboxed(t)
	path := filepath.Join(t.TempDir(), "run")
	if err := os.WriteFile(path, []byte("#!/bin/sh\necho it runs\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{oldKernelEnv + "=" + path}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "no sandbox: this kernel has no Landlock") || !strings.Contains(string(out), "\nlandlock: function not implemented") || strings.Contains(string(out), "it runs") {
		t.Errorf("%v: %s", err, out)
	}
}

// sandboxed skips a test where there is no sandbox. CI runs on Linux with Landlock.
func sandboxed(t *testing.T) int {
	t.Helper()
	if err := Available(); err != nil {
		t.Skip(err)
	}
	abi, err := kernelABI()
	if err != nil {
		t.Fatal(err)
	}
	return abi
}

// TestHostilePlugin: nothing that a hostile plugin tries reaches the relay, whichever version
// of Landlock the kernel has, and what a usual plugin needs works.
func TestHostilePlugin(t *testing.T) {
	newest := sandboxed(t)
	for abi := 1; abi <= newest; abi++ {
		t.Run(fmt.Sprintf("ABI %d", abi), func(t *testing.T) {
			w, p := build(t)
			w.Tasks = os.Getuid() != 0 && abi == newest
			p.MaxABI = abi
			checkReport(t, run(t, w, p), abi)
			for path, want := range map[string]string{"keys/1.key": "key", "relay.db": "database"} {
				if b, err := os.ReadFile(filepath.Join(w.State, path)); string(b) != want {
					t.Errorf("%s is now %q %v", path, b, err)
				}
			}
		})
	}
}

func checkReport(t *testing.T, report map[string]string, abi int) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(report)) {
		err, isNeed := report[name], strings.HasPrefix(name, "+")
		if name == "signal the relay" && abi < abiScopes { // Landlock cannot, and a filter cannot tell whose a process is
			continue
		}
		if isNeed && err != "" {
			t.Errorf("a plugin can not %s: %s", name[1:], err)
		} else if !isNeed && err == "" {
			t.Errorf("a plugin can %s", name)
		}
	}
	if len(report) < 70 {
		t.Errorf("only %d tries", len(report))
	}
}

// TestHostilePluginOfUser is TestHostilePlugin for a relay of an ordinary user.
func TestHostilePluginOfUser(t *testing.T) {
	sandboxed(t)
	if os.Getuid() != 0 {
		t.Skip("TestHostilePlugin runs as an ordinary user already; CI runs both as root")
	}
	const nobody = 65534
	dir, err := os.MkdirTemp("/tmp", "sandbox")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(dir, "sandbox.test")
	if err := errors.Join(os.WriteFile(bin, exe, 0o755), os.Chown(dir, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "-test.run=^TestHostilePlugin$", "-test.v")
	cmd.Dir, cmd.Env = dir, []string{"TMPDIR=" + dir, "PATH=/usr/bin:/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestHostilePlugin") {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRefused: what a policy must not allow is refused before the program runs.
func TestRefused(t *testing.T) {
	sandboxed(t)
	for name, tt := range map[string]struct {
		change func(p *Policy, state string)
		want   string
	}{
		"the state directory":         {func(p *Policy, state string) { p.Read = []string{state} }, "lies in"},
		"a key":                       {func(p *Policy, state string) { p.Write = []string{filepath.Join(state, "keys", "1.key")} }, "lies in"},
		"what contains it":            {func(p *Policy, state string) { p.Read = []string{filepath.Dir(state)} }, "contains"},
		"everything":                  {func(p *Policy, _ string) { p.Read = []string{"/"} }, "contains"},
		"a link to it":                {func(p *Policy, state string) { p.Read = []string{linkTo(t, state)} }, "lies in"},
		"by ..":                       {func(p *Policy, state string) { p.Read = []string{state + "/plugins/../keys"} }, "lies in"},
		"what is not there":           {func(p *Policy, _ string) { p.Read = []string{"/nonexistent"} }, "no such file"},
		"a folder that is everything": {func(p *Policy, _ string) { p.Folder = "/" }, "still readable"},
		"a private file in /usr":      {func(p *Policy, _ string) { p.Private = append(p.Private, "/usr/bin/env") }, "contains"},
	} {
		t.Run(name, func(t *testing.T) {
			w, p := build(t)
			tt.change(&p, w.State)
			err := Start(Command(p, filepath.Join(w.Folder, "run")))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func linkTo(t *testing.T, path string) string {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	return link
}

// TestMore: a policy gives what it names, and takes the network.
func TestMore(t *testing.T) {
	sandboxed(t)
	w, p := build(t)
	more := t.TempDir()
	if err := os.Chmod(more, 0o700); err != nil {
		t.Fatal(err)
	}
	p.Read, p.NoNetwork = []string{"/etc/shadow"}, true
	if os.Getuid() != 0 {
		p.Read = nil
	}
	w.Data, p.Write = more, []string{more} // "data" of the plugin is a folder that an operator allowed
	p.Data = ""
	if err := errors.Join(os.WriteFile(filepath.Join(more, "before"), nil, 0o600), os.Mkdir(filepath.Join(more, "tmp"), 0o700)); err != nil {
		t.Fatal(err)
	}
	report := run(t, w, p)
	if os.Getuid() == 0 && report["read the password hashes"] != "" {
		t.Errorf("what is allowed to read: %s", report["read the password hashes"])
	}
	for _, need := range []string{"+connect by TCP", "+send by UDP", "+list its addresses"} {
		if report[need] == "" {
			t.Errorf("without network: %s", need)
		}
		delete(report, need)
	}
	delete(report, "read the password hashes")
	delete(report, "move its own data") // it can: the folder's parent is not private
	for name, err := range report {
		if strings.HasPrefix(name, "+") && err != "" {
			t.Errorf("%s: %s", name, err)
		}
	}
}

// TestInterpreters: the usual ones work in the sandbox.
func TestInterpreters(t *testing.T) {
	sandboxed(t)
	for _, tt := range []struct{ program, script string }{
		{"/bin/sh", `ls /usr >/dev/null && mktemp >/dev/null && echo good`},
		{"/usr/bin/python3", "import ssl, json, tempfile, subprocess, socket, random, shutil, os\n" +
			"f = tempfile.NamedTemporaryFile()\nshutil.copy(f.name, os.environ['HOME'] + '/copy')\n" +
			"subprocess.run(['true'], check=True)\nsocket.socketpair()\nprint('good')"},
		{"/usr/bin/node", "const fs = require('fs'); fs.writeFileSync(process.env.HOME + '/x', 'y'); require('child_process').execFileSync('true'); setTimeout(() => console.log('good'), 1)"},
	} {
		t.Run(filepath.Base(tt.program), func(t *testing.T) {
			if _, err := os.Stat(tt.program); err != nil {
				t.Skipf("%s is not installed; CI has it", tt.program)
			}
			w, p := build(t)
			if err := os.WriteFile(filepath.Join(w.Folder, "run"), []byte("#!"+tt.program+"\n"+tt.script), 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := Command(p, filepath.Join(w.Folder, "run"))
			cmd.Dir, cmd.Env = w.Folder, []string{"PATH=/usr/bin:/bin", "HOME=" + w.Data, "TMPDIR=" + filepath.Join(w.Data, "tmp")}
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := Start(cmd); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait()
			if strings.TrimSpace(out.String()) != "good" {
				t.Errorf("it said %q", out.String())
			}
		})
	}
}

// BenchmarkStart is the time to start /bin/true, with and without the sandbox.
func BenchmarkStart(b *testing.B) {
	dir := b.TempDir()
	b.Run("sandbox", func(b *testing.B) {
		for b.Loop() {
			cmd := Command(Policy{Folder: dir, Data: dir, Temp: "tmp"}, "/bin/true")
			if err := Start(cmd); err != nil {
				b.Fatal(err)
			}
			_ = cmd.Wait()
		}
	})
	b.Run("plain", func(b *testing.B) {
		for b.Loop() {
			_ = exec.Command("/bin/true").Run()
		}
	})
}
