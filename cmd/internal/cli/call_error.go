package cli

import (
	"encoding/json"
	"strings"
)

// CallError is the error of a call to a tool. Explain chooses the next step by the tool: its board may be
// offline, its plugin may not be loaded. Err is an error of package client, or has the text with which the
// tool itself refused.
type CallError struct {
	Tool      string
	Arguments json.RawMessage
	Takes     []string // names of the tool's arguments; empty if they are not known
	Err       error
}

func (e *CallError) Error() string { return e.Err.Error() }

func (e *CallError) Unwrap() error { return e.Err }

// plugin returns the name of the plugin that provides the tool; "" for a tool of a board.
func (e *CallError) plugin() string {
	if !isPluginTool(e.Tool) {
		return ""
	}
	name, _, _ := strings.Cut(e.Tool, ".")
	return name
}

// board returns the first board that the arguments of a fleet tool name, to be put into a command. A text
// that a shell could take for more than a name becomes NODE.
func (e *CallError) board() string {
	var args struct {
		Board  string   `json:"board"`
		Boards []string `json:"boards"`
	}
	_ = json.Unmarshal(e.Arguments, &args)
	if args.Board == "" && len(args.Boards) > 0 {
		args.Board = args.Boards[0]
	}
	if args.Board == "" || strings.ContainsFunc(args.Board, func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' }) {
		return "NODE"
	}
	return args.Board
}
