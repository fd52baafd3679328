-- ---------------------------------------------------------------- a stage on several hosts

-- A training that asks for several hosts runs on as many workers, a gang. The worker that holds the job's lease leads. Its
-- table is that of a capture by several workers (ranges.lua) with one range, which stands for the whole stage. Idle workers
-- become members, as they would help with a capture.
--
--   a gang   where
--   gathers  the range is untouched: members are missing
--   works    the range is taken, once all members are there; each has a number, 0 leads, and knows the 'key'
--   grows    'grows' is set: it has worked with fewer hosts than it wants, and another worker idles. The leader stops
--   is lost  'lost' names a member whose lease ran out, or that has failed: the leader ends the attempt
--
-- An attempt that has found too few members gives its claim back, and the job rests before it gathers again. If an older job
-- gathers too and wants the leader's worker, the younger one gives way at once, so that no two wait for each other.

-- A job that gathered in vain rests for so long: other jobs go first.
local REST_MS = 10000

-- Whether an older job gathers and wants a worker that has these devices.
local function must_give_way(id, gpus, memory)
  for _, other in ipairs(redis.call('ZRANGE', 'kd:boards', 0, -1)) do
    if other == id then return false end
    if is_gang(other) and count_missing(other) > 0 and fits(other, gpus, memory) then return true end
  end
end

local function number_members(id)
  local tokens = redis.call('HKEYS', key(id, 'ranges:members'))
  table.sort(tokens, function(a, b) return tonumber(a) < tonumber(b) end)
  for number, token in ipairs(tokens) do
    local member = read_member(id, token)
    member.number = number - 1
    write_member(id, token, member)
  end
end

-- gang_open(id, fence, worker, lease_ms, terms, hosts) -> {opened, token of the leader} | {fenced}
function transitions.gang_open(id, fence, worker, lease, terms, hosts)
  local opened = transitions.ranges_open(id, fence, worker, lease, terms, 1, 1, hosts)
  if opened[1] == 'opened' then redis.call('HSET', key(id, 'ranges'), 'hosts', hosts) end
  return opened
end

-- gang_begin(id, token, lease_ms, gpus, memory, key, enough) -> the number of hosts | wait | yield | fenced: the leader asks
-- whether so many are there
function transitions.gang_begin(id, token, lease, gpus, memory, secret, enough)
  drop_expired(id)
  if not read_member(id, token) then return 'fenced' end
  redis.call('ZADD', key(id, 'ranges:ends'), now + lease, token)
  local there = redis.call('ZCARD', key(id, 'ranges:ends'))
  if there < tonumber(enough) then return must_give_way(id, gpus, memory) and 'yield' or 'wait' end
  redis.call('HSET', key(id, 'ranges'), 'next', 1, 'key', secret, 'there', there, 'began', now)
  number_members(id)
  return there
end

-- gang_beat(id, token, lease_ms) -> {wait} | {go, number, key, hosts} | {grow}, to the leader | {lost, who and why} | {fenced}
function transitions.gang_beat(id, token, lease)
  drop_expired(id)
  local member = read_member(id, token)
  if not member then return {'fenced'} end
  redis.call('ZADD', key(id, 'ranges:ends'), now + lease, token)
  local secret, lost, grows, there = unpack(redis.call('HMGET', key(id, 'ranges'), 'key', 'lost', 'grows', 'there'))
  if not secret then return {'wait'} end
  if lost then return {'lost', lost} end
  if grows and member.owner then return {'grow'} end
  return {'go', string.format('%d', member.number), secret, there}
end

-- gang_end(id, fence) -> the status after it | fenced: the leader gives up a gang that does not fill
function transitions.gang_end(id, fence)
  if not holds(id, fence) then return 'fenced' end
  local hosts, missing = redis.call('HGET', key(id, 'ranges'), 'hosts'), count_missing(id)
  if hosts and missing > 0 then
    warn(id, string.format('%d of %d hosts came: the job waits until as many workers are free.', hosts - missing, hosts))
  end
  redis.call('HSET', key(id), 'rests_until', now + REST_MS)
  return stopped(id)
end
