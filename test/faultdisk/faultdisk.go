// Package faultdisk gives tests a directory on a disk that hangs, fails, is full or tears writes,
// on command. It builds and runs test/faultfs, a program of a separate module.
package faultdisk

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Disk is a mounted directory. The test's end unmounts it.
type Disk struct {
	Dir     string // on the disk
	Backing string // where the files really are: what a test reads or damages past the faults

	t       testing.TB
	control string
}

// New mounts a disk without faults. It skips the test where FUSE cannot be used: it takes
// /dev/fuse and root. CI runs as root.
func New(t testing.TB) *Disk {
	t.Helper()
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil || os.Geteuid() != 0 {
		t.Skipf("a failing disk needs root and /dev/fuse (%v); run the test as root", err)
	}
	_ = f.Close()
	base := t.TempDir()
	d := &Disk{Dir: filepath.Join(base, "disk"), Backing: filepath.Join(base, "backing"), control: filepath.Join(base, "c"), t: t}
	for _, dir := range []string{d.Dir, d.Backing} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(build(t, base), d.Backing, d.Dir, d.control)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		_ = syscall.Unmount(d.Dir, syscall.MNT_DETACH) // in case it was killed
	})
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatal("faultfs did not mount; see its message above")
	}
	return d
}

// Fault gives one command, as test/faultfs documents them: d.Fault("hang", "fsync", "events.db*").
func (d *Disk) Fault(words ...string) {
	d.t.Helper()
	c, err := net.DialTimeout("unix", d.control, 5*time.Second)
	if err != nil {
		d.t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := fmt.Fprintln(c, strings.Join(words, " ")); err != nil {
		d.t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || string(answer) != "ok\n" {
		d.t.Fatalf("%v: %s%v", words, answer, err)
	}
}

// Clear ends all faults; what hangs goes on.
func (d *Disk) Clear() {
	d.t.Helper()
	d.Fault("clear")
}

// build builds test/faultfs into a directory.
func build(t testing.TB, dir string) (program string) {
	t.Helper()
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(filepath.Dir(strings.TrimSpace(string(mod))), "test", "faultfs")
	program = filepath.Join(dir, "faultfs")
	cmd := exec.Command("go", "build", "-C", source, "-trimpath", "-buildvcs=false", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build test/faultfs: %v\n%s", err, out)
	}
	return program
}
