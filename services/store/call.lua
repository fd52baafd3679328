-- ---------------------------------------------------------------- the call

-- format() -> the format of the records
function transitions.format() return FORMAT end

-- An error if the records have another format than this script; an empty server gets this format.
local function refusal()
  -- The first records had an index of another name, and no format.
  local found = redis.call('GET', 'kd:format') or (redis.call('EXISTS', 'kd:jobs') == 1 and '1')
  if found == FORMAT then return end
  if not found then
    redis.call('SET', 'kd:format', FORMAT)
    return
  end
  local newer = tonumber(found) > tonumber(FORMAT)
  local text = '%s the records are of format %s, and this version of Potstill reads format %s: use %s version.'
  return {err = string.format(text, newer and 'NEWERFORMAT' or 'OLDERFORMAT', found, FORMAT,
    newer and 'a newer' or 'an older')}
end

local refused = refusal()
if refused then return refused end
local answer = transitions[ARGV[1]](unpack(ARGV, 2))
local done = 1
while settling[done] do  -- a loop, because a chain of jobs may be longer than the stack is deep
  settle(unpack(settling[done]))
  done = done + 1
end
return answer
