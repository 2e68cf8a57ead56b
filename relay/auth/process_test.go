package auth

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"agentctl/manifest"
)

// runJob is the main function of a process that a test starts from this test binary (job, killedJob).
// It prints a line for each change that was answered: a token, or what was revoked.
func runJob(job string) int {
	dir, n := os.Getenv("AUTH_TEST_DIR"), 0
	n, _ = strconv.Atoi(os.Getenv("AUTH_TEST_N"))
	s, err := Open(Options{StateDir: dir})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer s.Close()
	for i := range n {
		switch job {
		case "mint":
			list, err := s.Mint(context.Background(), MintRequest{Class: "device", Tenant: "t" + strconv.Itoa(i%3)})
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			fmt.Println(list[0].Token)
		case "crash":
			list, err := s.Mint(context.Background(), MintRequest{Class: "device", Tenant: "acme", Count: 2})
			if err == nil {
				_, err = s.Revoke(context.Background(), RevokeRequest{JTI: list[1].JTI})
			}
			if err == nil {
				_, err = s.UpsertNode(context.Background(), "acme", list[0].NodeID, "lab", []byte("[1]"))
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			fmt.Printf("%s\n%s\n", list[0].Token, list[1].Token)
			os.Exit(0) // nothing is closed, as after kill -9
		case "revoke-many":
			jti := manifest.NewULID()
			if _, err := s.Revoke(context.Background(), RevokeRequest{JTI: jti}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			os.Stdout.WriteString(jti + "\n")
		case "rotate":
			if _, err := s.RotateKeys(context.Background(), RotateRequest{DropOld: i%8 == 0}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			os.Stdout.WriteString("rotated\n")
		case "revoke":
			if _, err := s.Revoke(context.Background(), RevokeRequest{Subject: os.Getenv("AUTH_TEST_SUB")}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
	}
	return 0
}

// job runs a job n times in another process, and returns what it has printed.
func job(t *testing.T, name, dir string, n int, env ...string) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), append(env, "AUTH_TEST_JOB="+name, "AUTH_TEST_DIR="+dir, "AUTH_TEST_N="+strconv.Itoa(n))...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Errorf("job %s: %v: %s", name, err, stderr.String())
	}
	return string(out)
}

// killedJob runs a job without an end, kills it some time after its first line of output, and
// returns what it has printed.
func killedJob(t *testing.T, name, dir string, after time.Duration) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "AUTH_TEST_JOB="+name, "AUTH_TEST_DIR="+dir, "AUTH_TEST_N=1000000")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	first, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(after, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	rest, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return first + string(rest[:bytes.LastIndexByte(rest, '\n')+1])
}

// Several processes set up one fresh directory at once and mint in it: they agree on
// one relay and one key, and nothing is lost.
func TestConcurrentProcesses(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	const procs, each = 4, 15
	outs := make([]string, procs)
	var wg sync.WaitGroup
	for i := range procs {
		wg.Go(func() { outs[i] = job(t, "mint", dir, each) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	s := openStore(t, Options{StateDir: dir})
	seen := map[string]bool{}
	for _, token := range strings.Fields(strings.Join(outs, "\n")) {
		id, err := s.Verify(token, ClassDevice)
		if err != nil {
			t.Fatal(err)
		}
		if tenant, ok := s.NodeTenant(id.NodeID); !ok || tenant != id.Tenant {
			t.Errorf("owner of %s: got %q, %v", id.NodeID, tenant, ok)
		}
		seen[id.JTI] = true
	}
	list, err := s.Tokens(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(seen) != procs*each || len(list) != procs*each {
		t.Errorf("got %d tokens, %d in the list, want %d", len(seen), len(list), procs*each)
	}
	if keys, _ := os.ReadDir(filepath.Join(dir, keysDir)); len(keys) != 1+1 { // and the copy of relay.json
		t.Errorf("got %d keys, want 1", len(keys))
	}
}

// A running relay and `agentctl token revoke` in another process.
func TestRevokeFromAnotherProcess(t *testing.T) {
	t.Parallel()
	s := openStore(t, Options{})
	m := mint(t, s, MintRequest{Class: "agent", Subject: "claude"})
	id, err := s.Verify(m.Token)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() { job(t, "revoke", s.dir.path, 5, "AUTH_TEST_SUB=claude") })
	}
	for i := range 50 { // writes of ours meanwhile
		mint(t, s, MintRequest{Class: "agent", Subject: "other" + strconv.Itoa(i)})
	}
	wg.Wait()
	if err := s.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused(t, s.Active(id), m.Token, ErrRevoked, "revoked")
	_, err = s.Verify(m.Token)
	refused(t, err, m.Token, ErrRevoked, "revoked")
}

// What was answered for is on disk, however the process ends.
func TestCrashKeepsCommittedWrites(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	tokens := strings.Fields(job(t, "crash", dir, 1))
	if len(tokens) != 2 {
		t.Fatalf("got %q", tokens)
	}
	if _, err := os.Stat(filepath.Join(dir, dbFile+"-wal")); err != nil {
		t.Fatalf("the process closed its database: %v", err)
	}
	s := openStore(t, Options{StateDir: dir})
	id, err := s.Verify(tokens[0], ClassDevice)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Verify(tokens[1], ClassDevice)
	refused(t, err, tokens[1], ErrRevoked, "revoked")
	if n, err := s.Node(t.Context(), "acme", "lab"); err != nil || n.NodeID != id.NodeID || string(n.Manifest) != "[1]" {
		t.Errorf("got %+v, %v", n, err)
	}
}
