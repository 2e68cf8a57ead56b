package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"agentctl/relay/plugins/sandbox"
)

// The life of a plugin's process:
//
// 	start  dir/run in a sandbox and a new process group, with a minimal environment
// 	run    JSON-RPC over stdin and stdout, log lines over stderr
// 	stop   close stdin; after stopGrace kill the process group
// 	end    wait for the process, then kill the rest of its group
//
// A process that does not read is ended by the kill of Send (see lineChannel).

// stopGrace is how long a plugin's process may run after its stdin was closed. Then it is
// killed, with its process group. Tests shorten it.
var stopGrace = 2 * time.Second

// socketDialer connects to a server that the relay does not start. The end of the connection
// does not end that server.
func socketDialer(path string) func(context.Context) (*lineChannel, error) {
	return func(ctx context.Context) (*lineChannel, error) {
		var d net.Dialer
		nc, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, err
		}
		return newLineChannel(nc, nc, func() { _ = nc.Close() }, nc.Close), nil
	}
}

// child is how the executable of a plugin is started.
type child struct {
	name    string // of the plugin
	dir     string // its folder
	program program
	data    string // its folder for data, made at each start; "" for none
	policy  sandbox.Policy
	sandbox bool                // false: the process may do what the relay may
	user    *syscall.Credential // nil: that of this process
	stderr  io.Writer           // nil: its lines are logged
}

// dial starts the executable and connects to its stdio. The process gets none of the relay's
// environment, which may hold secrets, except PATH. It leads a new process group, so that a kill
// also reaches its children.
//
// The process does not end with the context of the dial, which bounds the handshake only. The
// returned channel's Close stops it and waits for it.
func (c *child) dial(log *zap.Logger) func(context.Context) (*lineChannel, error) {
	return func(context.Context) (*lineChannel, error) {
		path, dir := c.program.path, c.dir
		env := pluginEnv(c.name, dir)
		if c.data != "" {
			if err := makeDataDir(c.data); err != nil {
				return nil, err
			}
			env = pluginEnv(c.name, c.data)
			if c.sandbox {
				env = append(env, "TMPDIR="+filepath.Join(c.data, c.policy.Temp)) // made by the sandbox
			}
		}
		start, cmd := (*exec.Cmd).Start, exec.Command(path, c.program.args...)
		if c.sandbox {
			start, cmd = sandbox.Start, sandbox.Command(c.policy, path, c.program.args...)
		}
		cmd.Dir, cmd.Env = dir, append(env, c.program.env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.user}
		killWithParent(cmd.SysProcAttr)
		in, err := cmd.StdinPipe()
		if err != nil {
			return nil, err
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		if cmd.Stderr = c.stderr; c.stderr == nil {
			cmd.Stderr = newLineLogger(log)
		}
		cmd.WaitDelay = stopGrace // a child of the plugin may hold stderr open
		if err := start(cmd); err != nil {
			return nil, fmt.Errorf("start %s: %w", path, err)
		}
		log.Debug("plugin started", zap.Int("pid", cmd.Process.Pid))
		killAll := func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		ch := newLineChannel(out, in.(deadlineWriter), killAll, func() error { // an *os.File
			_ = in.Close() // the end of its input asks it to stop
			kill := time.AfterFunc(stopGrace, killAll)
			err := cmd.Wait()
			kill.Stop()
			killAll() // processes that it left behind
			var exit *exec.ExitError
			if errors.As(err, &exit) {
				log.Info("plugin ended", zap.String("status", exit.String()))
				return fmt.Errorf("it ended: %s", exit)
			}
			return nil
		})
		ch.isStopped = func() bool { return isStopped(cmd.Process.Pid) }
		return ch, nil
	}
}

// isStopped reports whether a process is stopped by a signal (proc_pid_stat(5)). The state follows the last
// parenthesis, since the name of the program before it may contain parentheses as well.
func isStopped(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	return strings.HasPrefix(string(b[bytes.LastIndexByte(b, ')')+1:]), " T ")
}

// pluginEnv is the environment of a plugin. home is where it can write. LANG makes interpreters use UTF-8
// for stdin and stdout, as MCP requires.
func pluginEnv(name, home string) []string {
	return []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "LANG=C.UTF-8", "MCP_AGENT_ID=plugin:" + name}
}

// makeDataDir makes the folder for a plugin's data, and the one that has those of all plugins.
// Only the relay's user can enter them. A link in their place is refused: the sandbox would allow the
// plugin to write where it leads.
func makeDataDir(dir string) error {
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make the plugin's folder for data: %w", err)
		}
		if st, err := os.Lstat(d); err != nil || !st.IsDir() {
			return fmt.Errorf("the plugin's folder for data is not a folder: %s", d)
		}
	}
	return nil
}
