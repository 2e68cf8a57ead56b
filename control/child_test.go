//go:build linux

package control

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"agentctl/prober"
)

// TestMain lets the test binary be its own child process: a daemon whose memory can be
// measured, one that systemd gave a socket, or a client of another user.
func TestMain(m *testing.M) {
	role, arg, _ := strings.Cut(os.Getenv("CONTROL_TEST_CHILD"), ":")
	switch role {
	case "":
		os.Exit(m.Run())
	case "server":
		childServer(arg)
	case "client":
		childClient(arg)
	}
	os.Exit(0)
}

// childServer serves until its stdin ends. An empty path is for an inherited socket.
func childServer(path string) {
	o := Options{Path: path, Prober: prober.New(prober.Options{Interval: time.Second})}
	if path == "" {
		os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
		ln, err := InheritedListener(os.Getenv)
		if err != nil || ln == nil {
			fmt.Println("inherited:", ln, err)
			os.Exit(1)
		}
		o.Listener = ln
	}
	o.Status = func(context.Context) any { return map[string]int{"pid": os.Getpid()} }
	o.History = openHistory(path)
	srv, err := NewServer(o)
	if err == nil {
		err = srv.Listen()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	go o.Prober.Run(ctx)
	fmt.Println("ready")
	srv.Serve(ctx)
}

// childClient prints the answer or the error that a client gets.
func childClient(path string) {
	c, err := Dial(context.Background(), path)
	if err != nil {
		fmt.Println(errors.Is(err, ErrPermission), err)
		return
	}
	_, err = c.Snapshot(context.Background())
	fmt.Println("snapshot", err)
	c.Close()
}

// startServer runs childServer; the returned function ends it.
func startServer(t *testing.T, path string, files ...*os.File) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CONTROL_TEST_CHILD=server:"+path, "LISTEN_FDS=1")
	cmd.ExtraFiles = files
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil && cmd.ProcessState.ExitCode() != -1 {
			t.Errorf("the child daemon: %v", err)
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the child daemon said %q, %v", line, err)
	}
	return cmd
}

// TestInherited checks that clients which connect between two daemons, to a socket that
// systemd holds, wait and are served.
func TestInherited(t *testing.T) {
	if ln, err := InheritedListener(func(string) string { return "" }); ln != nil || err != nil {
		t.Errorf("without systemd: %v, %v", ln, err)
	}
	other := map[string]string{"LISTEN_PID": "1", "LISTEN_FDS": "1"}
	if ln, err := InheritedListener(func(k string) string { return other[k] }); ln != nil || err != nil {
		t.Errorf("with another process's socket: %v, %v", ln, err)
	}
	two := map[string]string{"LISTEN_PID": strconv.Itoa(os.Getpid()), "LISTEN_FDS": "2"}
	if _, err := InheritedListener(func(k string) string { return two[k] }); err == nil || !strings.Contains(err.Error(), "ListenStream=") {
		t.Errorf("with two sockets: %v", err)
	}

	path := filepath.Join(shortDir(t), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f, err := ln.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()

	type answer struct {
		pid int
		err error
	}
	ask := func() (a answer) {
		c, err := Dial(t.Context(), path)
		if err != nil {
			return answer{0, err}
		}
		defer c.Close()
		var st struct {
			PID int `json:"pid"`
		}
		err = c.Status(t.Context(), &st)
		return answer{st.PID, err}
	}
	early := make(chan answer, 1)
	go func() { early <- ask() }()
	first := startServer(t, "", f)
	if a := <-early; a.err != nil || a.pid != first.Process.Pid {
		t.Errorf("a client that came early got %+v", a)
	}
	first.Process.Kill()
	first.Wait()
	go func() { early <- ask() }()
	second := startServer(t, "", f)
	if a := <-early; a.err != nil || a.pid != second.Process.Pid {
		t.Errorf("a client that came between two daemons got %+v", a)
	}
}

func TestPeerIsRefused(t *testing.T) {
	no := errors.New("not you")
	r := onSocket(t, Options{Allow: func(uid, gid uint32) error {
		if int(uid) != os.Geteuid() || int(gid) != os.Getegid() {
			t.Errorf("the peer is %d:%d", uid, gid)
		}
		return no
	}})
	for range 20 {
		_, err := Dial(t.Context(), r.srv.Addr())
		if !errors.Is(err, ErrPermission) || !strings.Contains(err.Error(), "join group") {
			t.Fatalf("a refused peer gets %v", err)
		}
	}
	if s := r.srv.Stats(); s.Denied != 20 || s.Accepted != 0 || s.Requests != 0 {
		t.Errorf("got %+v", s)
	}
}

// TestForeignUser connects as nobody, with and without the file modes in the way.
func TestForeignUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can become another user")
	}
	dir := shortDir(t)
	exe := filepath.Join(dir, "client")
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(exe, b, 0o755), os.Chmod(exe, 0o755), os.Chmod(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "run", "s")
	onSocket(t, Options{Path: path})
	open := filepath.Join(dir, "open")
	onSocket(t, Options{Path: open, Allow: func(uid, gid uint32) error {
		if uid != 65534 || gid != 65534 {
			return fmt.Errorf("the peer is %d:%d", uid, gid)
		}
		return nil
	}})
	if err := os.Chmod(open, 0o666); err != nil {
		t.Fatal(err)
	}
	ask := func(path string) string {
		cmd := exec.Command(exe)
		cmd.Dir = dir
		cmd.Env = []string{"CONTROL_TEST_CHILD=client:" + path, "GORACE=atexit_sleep_ms=0"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(bytes.TrimSpace(out))
	}
	if got := ask(path); !strings.HasPrefix(got, "true ") || !strings.Contains(got, "join group agentctl") {
		t.Errorf("kept out by the directory's mode, user nobody got %q", got)
	}
	if err := errors.Join(os.Chmod(filepath.Dir(path), 0o755), os.Chmod(path, 0o666)); err != nil {
		t.Fatal(err)
	}
	if got := ask(path); !strings.HasPrefix(got, "true ") || !strings.Contains(got, "unauthorized") {
		t.Errorf("refused by its credentials, user nobody got %q", got)
	}
	if got := ask(open); got != "snapshot <nil>" {
		t.Errorf("allowed, user nobody got %q", got)
	}
}

func TestAllowGroup(t *testing.T) {
	self := uint32(os.Geteuid())
	for uid, want := range map[uint32]bool{0: true, self: true, 4242424242: false} {
		if err := AllowGroup(uid, 4242424242); (err == nil) != want {
			t.Errorf("AllowGroup(%d) = %v", uid, err)
		}
	}
	if g, err := user.LookupGroup(Group); err == nil {
		gid, _ := strconv.ParseUint(g.Gid, 10, 32)
		if err := AllowGroup(4242424242, uint32(gid)); err != nil {
			t.Errorf("a process of group %s: %v", Group, err)
		}
	}
}
