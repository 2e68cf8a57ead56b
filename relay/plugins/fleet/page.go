package fleet

import (
	"encoding/base64"
	"encoding/json"

	"agentctl/relay/plugins/arguments"
)

// MaxAnswer bounds the JSON of an answer, bytes: some 500 tokens of a model's context.
const MaxAnswer = 2048

// fitRows encodes rows in order, until max bytes with the commas between them are used, and returns
// how many fit. The caller puts them into its answer as they are, and a cursor after the last one.
func fitRows[T any](rows []T, max int) (list []json.RawMessage, err error) {
	size := 0
	list = make([]json.RawMessage, 0, min(len(rows), max/32+1))
	for i := range rows {
		data, err := json.Marshal(&rows[i])
		if err != nil {
			return nil, err
		}
		if size += len(data) + 1; size > max {
			break
		}
		list = append(list, data)
	}
	return list, nil
}

// makeCursor makes the opaque cursor of a page that continues after a position. readCursor returns
// the position, "" for the first page.
// It needs no signature: it only says where a page of what the caller may see begins. The relay keeps
// nothing for it.
func makeCursor(position string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(position))
}

func readCursor(cursor string) (position string, err error) {
	b, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	if err != nil {
		return "", errCursor
	}
	return string(b), nil
}

// errCursor refuses a cursor that this tool has not given.
var errCursor = arguments.Invalid("argument cursor: not one of this tool's; leave it out to start again")
