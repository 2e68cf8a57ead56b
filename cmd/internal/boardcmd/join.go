//go:build linux

package boardcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/config"
	"agentctl/control"
	"agentctl/daemon"
	"agentctl/enrollment"
	"agentctl/joinctl"
	"agentctl/term"
	"agentctl/transport/enroll"
	"agentctl/transport/pin"
)

// How a board joins, and what a failure leaves (package enroll has the exchange, joinctl the choice of the
// board):
//
//	check the flags and the code         nothing has happened
//	find the board                       nothing has happened
//	store a new key (joining.json)       a repeat uses the same key
//	send key, code and proof             a repeat gets the same identity, without another use of the code
//	store credential.json                the board has joined, whatever fails from here on
//	the daemon reads it and links        it does so by itself, within seconds, if this process ends
//
// So a repeat is harmless after any failure. A power cut leaves one of these states as well, because each
// file is replaced as a whole.
//
// Progress and what to type next go to stderr; the identity goes to stdout, for scripts with -o json.

// joinOptions are the flags of join and leave, which name the same board. leave has those of the first
// group.
type joinOptions struct {
	out      cli.Output
	socket   socketFlag
	stateDir string
	config   string

	// Of join alone. tokenFile has the token of a board that was set up by hand: its node is kept
	// (migration).
	codeFile, caSHA256, name, tokenFile string
	noWait                              bool
}

// Times of join and leave.
const (
	joinTimeout  = 60 * time.Second // of the exchange with the relay
	readyTimeout = 30 * time.Second // of the daemon, which notices the join within 3 s
)

// newJoin makes the command join. The flags of leave are a part of those of join, and both share
// joinOptions.
func newJoin() *cobra.Command {
	var o joinOptions
	c := &cobra.Command{
		Use:   "join URL CODE",
		Short: "Join this board to a relay, with the line that its operator pasted",
		Long: `Join this board to a relay. Get the line to paste on the relay's machine: agentctl invite

The board makes a key, which is its identity from then on, and stores it with a token in the
daemon's state directory. A daemon that runs switches to the relay without a restart. It is
harmless to repeat: a code is not used twice for one board.

CODE may be - for standard input, which keeps it out of the list of processes.`,
		Example: `  sudo agentctl join https://relay.example:8460 7K3M-9QTR-2HXW-DB5N --ca-sha256 HEX
  agentctl join https://relay.example:8460 --code-file code.txt      the daemon of this user
  sudo agentctl join URL CODE --token-file /etc/agentctl/token       keeps the node of that token`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error { return o.join(cmd, args) },
	}
	f := c.Flags()
	o.addTargetFlags(c)
	f.StringVar(&o.codeFile, "code-file", "", "`FILE` with the code, in place of CODE")
	f.StringVar(&o.caSHA256, "ca-sha256", "", "SHA-256 of the relay's own authority in `HEX`, as the invite has it: trust this relay and no other")
	f.StringVar(&o.name, "name", "", "`NAME` for the relay to show; an invite with a name takes precedence")
	f.StringVar(&o.tokenFile, "token-file", "", "`FILE` with the device token that the board has, whose node, name and history are kept")
	f.BoolVar(&o.noWait, "no-wait", false, "do not wait until the board is online")
	o.out.AddFlags(c)
	return c
}

// addTargetFlags adds the flags that name a board on this machine: by its daemon or by its files.
func (o *joinOptions) addTargetFlags(c *cobra.Command) {
	o.socket.addFlags(c)
	c.Flags().StringVar(&o.stateDir, "state-dir", "", "`DIR` with the identity (default: that of the daemon)")
	c.Flags().StringVar(&o.config, "config", "", "configuration `FILE` of the daemon")
}

// target finds the board. Without flags it is the user's own daemon, else the service.
//
// A person who types sudo out of habit would join the service, which does not run, in place of the
// daemon that they have started themselves: that is refused, unless a flag names the board.
//
// The files are those of this user if a daemon of this user has made its socket, also if the user has no
// configuration file: ClientSource would take the service's then.
func (o *joinOptions) target(cmd *cobra.Command) (*joinctl.Target, error) {
	source := config.ClientSource(o.config)
	if _, err := os.Lstat(config.DefaultSocket()); err == nil {
		source = config.NewSource(o.config)
	}
	t, err := joinctl.Find(cmd.Context(), joinctl.Options{Socket: o.socket.Path, StateDir: o.stateDir, Source: source})
	if err != nil {
		return nil, err
	}
	// Only sudo sets SUDO_UID: a login shell of root means the service.
	if uid := os.Getenv("SUDO_UID"); t.Daemon == nil && os.Geteuid() == 0 && uid != "" && uid != "0" &&
		!cmd.Flags().Changed("socket") && o.stateDir == "" && o.config == "" && joinctl.OtherUsersDaemon(cmd.Context(), uid) {
		return nil, cli.Errorf(cli.ExitFailure, "the daemon that runs here belongs to %s and not to root; type the same without sudo", os.Getenv("SUDO_USER"))
	}
	return t, nil
}

// join checks everything that can be wrong on this machine before the exchange with the relay, because
// that may use up the code. After the exchange the board has joined whatever else fails, and the
// answer is printed in each case: a script needs the node id also if the board is not online.
//
// Its steps: check what was typed, find the board (target), exchange the code for an identity and store it
// (joinctl.Target.Join), wait until the daemon has a link with it (wait), print the answer.
func (o *joinOptions) join(cmd *cobra.Command, args []string) error {
	jo := enroll.JoinOptions{Relay: args[0], CASHA256: o.caSHA256, Name: o.name, Version: cli.Version}
	if _, err := enroll.BaseURL(jo.Relay); err != nil {
		return cli.Errorf(cli.ExitUsage, "%w", err)
	}
	if o.caSHA256 != "" {
		if _, err := pin.Parse(strings.ToLower(o.caSHA256)); err != nil {
			return cli.Errorf(cli.ExitUsage, "--ca-sha256: %w", err)
		}
	}
	if k := config.FindKey("name"); o.name != "" {
		if _, err := k.Parse(o.name); err != nil {
			return cli.Errorf(cli.ExitUsage, "--name: %w", err)
		}
	}
	var err error
	if jo.Code, err = cli.ReadCode(cmd, args[1:], o.codeFile, "agentctl invite"); err != nil {
		return err
	}
	if o.tokenFile != "" {
		if jo.Token, err = cli.ReadToken(o.tokenFile); err != nil {
			return err
		}
	}
	t, err := o.target(cmd)
	if err != nil {
		return err
	}
	if t.Daemon != nil {
		defer t.Daemon.Close()
	}
	// From here on the code may be used up.
	ctx, cancel := context.WithTimeout(cmd.Context(), joinTimeout)
	defer cancel()
	j, err := t.Join(ctx, jo, Build().Time)
	if err != nil {
		return explainJoin(err)
	}
	w := cmd.ErrOrStderr()
	if j.Already {
		fmt.Fprintf(w, "This board has joined %s before, and keeps its node; the code was not used.\n", j.Relay)
	} else {
		fmt.Fprintf(w, "Joined %s. Undo it with: agentctl leave%s\n", j.Relay, cli.GivenFlags(cmd, "socket", "state-dir", "config"))
	}
	// These settings name the relay that the board has joined: with another one Join would have failed.
	if j.Unused != "" {
		fmt.Fprintf(w, "The settings %s are no longer used; you may remove them.\n", j.Unused)
	}
	// An exchange that took long does not shorten the wait. Ctrl-C ends only the wait: the answer is
	// printed all the same.
	online, problem := o.wait(cmd, t, j)
	err = o.out.Print(cmd, joinOutput{j.NodeID, j.Name, j.TenantID, j.Relay, online}, func() error {
		return printJoined(cmd.OutOrStdout(), t, j, online)
	})
	return errors.Join(err, problem)
}

// joinOutput is the answer of join in JSON; scripts read it.
type joinOutput struct {
	NodeID   string `json:"node_id"`
	Name     string `json:"name"`
	TenantID string `json:"tenant_id"`
	Relay    string `json:"relay"`
	Online   bool   `json:"online"`
}

// wait waits until the board is online, unless there is no daemon or --no-wait is given. The error says
// what keeps the board offline, as the daemon reports it in its status.
//
// It returns an error only after the board has joined, and each text says so: the person must not paste
// another code.
func (o *joinOptions) wait(cmd *cobra.Command, t *joinctl.Target, j *joinctl.Joined) (online bool, problem error) {
	if t.Daemon == nil || o.noWait {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), readyTimeout)
	defer cancel()
	s, err := t.WaitReady(ctx, j.NodeID)
	switch {
	case err == nil:
		return true, nil
	case cmd.Context().Err() != nil:
		return false, errors.New("interrupted; the board has joined, and the daemon goes on: agentctl status")
	// The status could not be read: the daemon has ended, or has not answered once in the time.
	case s == nil || !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, joinctl.ErrRefused):
		return false, fmt.Errorf("the board has joined, and its daemon does not answer: %w; see: agentctl status", err)
	}
	// The time is up, or the relay refuses the key. The join knows more than the link does, so that its
	// error comes first.
	why, next := "no link to the relay yet", "the daemon goes on trying; see: agentctl status"
	if s.Join != nil && s.Join.Error != "" {
		why, next = s.Join.Error, s.Join.Hint
	} else if e := s.Link.LastError; e != nil {
		why, next = e.Message, s.LinkHint()
	}
	return false, fmt.Errorf("the board has joined, but is not online: %s; %s", why, next)
}

// printJoined prints what the board is at its relay, and what is left to do until it is online.
func printJoined(w io.Writer, t *joinctl.Target, j *joinctl.Joined, online bool) error {
	row := func(k, v string) { fmt.Fprintf(w, "%-8s%s\n", k, term.SafeText(v)) }
	if j.Name != "" {
		row("Name", j.Name)
	}
	row("Node", j.NodeID)
	row("Tenant", j.TenantID)
	row("Relay", j.Relay)
	switch {
	case online:
		row("Online", "yes; see this board there: agentctl ls, and here: agentctl status")
	case t.Daemon != nil:
		row("Online", "not yet; see: agentctl status")
	case t.StateDir == config.SystemStateDir:
		row("Online", "no, the daemon does not run; start it: sudo systemctl enable --now agentctl.socket agentctl")
	default:
		row("Online", "no, no daemon runs with "+t.StateDir+"; start one: agentctl run --state-dir "+t.StateDir)
	}
	return nil
}

// explainJoin gives an error of join, or of the files of leave, its exit code and the next step. What the
// daemon would advise about the same error is daemon.JoinHint; a person at a terminal can do more in two
// cases: use sudo, and repeat.
//
// The relay's refusals are exit code 4, but for that of a nonce (enrollment.ReasonNonce): a repeat gets a
// new one.
func explainJoin(err error) error {
	var e *enroll.Error
	code, next := cli.ExitFailure, daemon.JoinHint(err)
	switch {
	case errors.Is(err, fs.ErrPermission):
		next = "use sudo, or name your own daemon's state directory with --state-dir"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), errors.Is(err, control.ErrNotRunning):
		next = "do the same again: the code is not lost"
	case errors.As(err, &e) && (e.Kind == enroll.Refused && e.Reason != enrollment.ReasonNonce || e.Kind == enroll.ForAgent):
		code = cli.ExitUnauthorized
	}
	return cli.Errorf(code, "%w\n%s", err, next)
}
