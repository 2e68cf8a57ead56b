// Package boardcmd has the commands of a board: its daemon (run), joining and leaving a relay, settings,
// checks, and readings from the daemon's control socket.
//
// They need Linux, except history, which also shows the records of a board behind a relay. The board build
// contains all of them, so the package links nothing of the relay.
//
// # Files
//
// What a command does when no daemon runs decides its form:
//
//	run.go                             is the daemon, or a number of mock boards
//	status.go, snapshot.go, watch.go   ask the daemon over its control socket (socket.go); without one they
//	sampling.go, burst.go              end with exit code 3. sampling.go has start and stop.
//	history.go, history_board.go       likewise; with --board they ask a relay and need no daemon here
//	join.go, leave.go                  use the daemon if one answers, else the files that it reads: a board
//	config.go, config_*.go             is set up before its daemon starts first
//	doctor.go                          reports a daemon that does not answer as a finding
//	helper_commands.go                 hidden commands, which systemd starts for one request of the daemon
//	doctor_inside.go                   no command: the checks of doctor for the daemon itself
//
// The work is done elsewhere: in daemon, control, monitor, doctor, config with configctl, and joinctl.
// Here are flags, the order of the steps, what is printed where, and those exit codes that cli.Explain
// cannot know from the type of an error.
//
// # Which daemon
//
// Each user may run a daemon, and the service is one more. A command takes the socket of the user's own
// daemon if it exists, else that of the service (config.ClientSocket). The service's is for root, the user
// of the service and the members of group agentctl (control.AllowGroup): others end with exit code 4, and
// the error has the command that adds them. An undo that is printed repeats the flags that chose the
// daemon.
//
// # Interruption
//
// Ctrl-C and SIGTERM end the context of a command (package main). For run and watch, once they have
// started, that is the usual end, with exit code 0. A change that the daemon or the disk has taken by then
// stays.
package boardcmd
